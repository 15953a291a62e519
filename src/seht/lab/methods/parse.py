"""Methods as text: ``seht-d(probes=10,prob=0.05)+label-smoothing``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seht import WeightPath
from seht.errors import unknown
from seht.lab.config import KINDS, Recipe
from seht.lab.fields import from_text, to_text
from seht.lab.methods import METHODS
from seht.lab.methods.base import Method
from seht.lab.methods.combined import Combined

_PART = re.compile(r"\s*(?P<name>[^()\s]+)\s*(\((?P<options>[^()]*)\))?\s*")
_MOST = 10**12  # of steps or probes: beyond it torch's counters overflow


@dataclass(frozen=True)
class Spec:
    """A method or a combination, as the user asked for it."""

    parts: Mapping[str, Mapping[str, Any]]
    """The options that were given, by the methods' names in the user's order."""

    @property
    def text(self) -> str:
        """The canonical text; :func:`parse` reads it back."""
        return "+".join(written(name, options) for name, options in self.parts.items())

    @property
    def slug(self) -> str:
        """A name for a directory: one for each text, safe on every file system."""
        text = self.text
        slug = re.sub(r"[(,]", "_", text.replace(")", ""))
        safe = re.sub(r"[^A-Za-z0-9._=+-]", "-", slug)
        if safe != slug or "_" in text or len(safe) > 100 or safe != safe.lower():
            safe = f"{safe[:80]}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return safe

    def along(self, paths: Mapping[str, WeightPath]) -> Spec:
        """The same with the weights of these paths, by the methods' names."""
        made = {}
        for name, given in self.parts.items():
            kept = {k: v for k, v in given.items() if k != "weight" or name not in paths}
            made[name] = kept | ({"weight": paths[name]} if name in paths else {})
        return Spec(made)

    def build(self, recipe: Recipe) -> Combined:
        """The methods for a recipe: its settings go before defaults, the user's before both."""
        made: dict[str, Method] = {}
        for name, options in sorted(self.parts.items(), key=lambda part: [*METHODS].index(part[0])):
            if recipe.task not in METHODS[name].tasks:
                words = {"image": "images", "table": "tables"}
                kinds = [words.get(task, task) for task in KINDS if task in METHODS[name].tasks]
                raise ValueError(
                    f"{name} works on {', '.join(kinds)}, and recipe {recipe.name} is "
                    f"{recipe.task}; leave it out"
                )
            settings = _checked(name, recipe.settings.get(name, {}))
            made[name] = _make(name, METHODS[name].settled(settings, options))
        return Combined(list(made.values()))

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Spec:
    """Read ``name(option=value,...)+name...``; a mistake is a :class:`ValueError` in one line."""
    parts = {}
    for name, given in read(text).items():
        if name not in METHODS:
            raise ValueError(unknown("method", name, METHODS))
        checked = _checked(name, given)
        parts[name] = {k: checked[k] for k in options(name) if k in checked}
    Combined([_make(name, given) for name, given in parts.items()])
    return Spec(parts)


def read(text: str) -> dict[str, dict[str, str]]:
    """The names in a text and their options, known or not."""
    parts: dict[str, dict[str, str]] = {}
    for piece in _split(text, "+"):
        found = _PART.fullmatch(piece)
        if found is None:
            raise ValueError(f"cannot read method {piece!r}; write name or name(option=value,...)")
        name = found["name"]
        if name in parts:
            raise ValueError(f"{name} is given twice in {text!r}; leave one out")
        given = parts[name] = {}
        for item in filter(None, map(str.strip, (found["options"] or "").split(","))):
            key, equals, value = map(str.strip, item.partition("="))
            if not equals or not value:
                raise ValueError(f"{name}: cannot read option {item!r}; write option=value")
            if key in given:
                raise ValueError(f"{name}: option {key} is given twice")
            given[key] = value
    return parts


def written(name: str, options: Mapping[str, Any]) -> str:
    """``name(option=value,...)``."""
    inside = ",".join(f"{key}={to_text(value)}" for key, value in options.items())
    return f"{name}({inside})" if inside else name


def split_list(text: str) -> list[str]:
    """Split ``a,b(c=1,d=2)+e`` at the commas outside parentheses."""
    return [piece.strip() for piece in _split(text, ",")]


def options(name: str) -> dict[str, Any]:
    """The types of a method's options."""
    return METHODS[name].options()


def _split(text: str, separator: str) -> Iterator[str]:
    depth, piece = 0, ""
    for character in text + separator:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character != separator or depth:
            piece += character
        elif not piece.strip():
            raise ValueError(f"a method is missing in {text!r}")
        else:
            yield piece
            piece = ""
    if depth:
        raise ValueError(f"the parentheses in {text!r} do not match")


def _make(name: str, given: dict[str, Any]) -> Method:
    try:
        return METHODS[name](**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _checked(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the types that the method asks for; recipes may have them as text, too."""
    known = options(name)
    for key in given:
        if key not in known:
            if not known:
                raise ValueError(f"{name} has no options, and {key!r} was given; leave it out")
            raise ValueError(f"{name}: {unknown('option', key, known)}")
    checked = {}
    for key, value in given.items():
        checked[key] = from_text(f"{name}: {key}", known[key], to_text(value))
        if type(checked[key]) is int and abs(checked[key]) > _MOST:
            raise ValueError(f"{name}: {key} must be at most {_MOST:,}, not {value}")
    return checked
