"""Fills in a page: ``base.html`` and ``base.css``, which all share, around what one has to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fill(folder: Path, **values: Any) -> str:
    """The ``template.html`` of a folder, which extends ``base.html``, in its ``style.css``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("template.html").render(**values)
