"""Docstrings name things as Sphinx does, ``:class:`seht.HessianTrace```; a page wants links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([^`]+)`")


def _link(match: re.Match[str]) -> str:
    name = match.group(1)
    inside = re.match(r"seht\.(?:measure\.)?\w+$", name) and not name.endswith(
        (".truth", ".measure")
    )
    return f"[`{name}`][{name}]" if inside and ":mod:" not in match.group() else f"`{name}`"


class Roles(griffe.Extension):
    """Turns roles into Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(_link, obj.docstring.value)
