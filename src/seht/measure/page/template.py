"""Fills in the template of a page, with the shared ``base.html`` and ``base.css``."""

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
