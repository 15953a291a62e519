"""Fills in a page: ``base.html`` and ``base.css``, which all share, around what one has to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fill(folder: Path, name: str = "template.html", /, **values: Any) -> str:
    """A folder's template; one of HTML may extend ``base.html``, in the folder's ``style.css``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(name).render(**values)
