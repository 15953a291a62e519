"""Methods as text: ``seht-d(probes=10,prob=0.05)+label-smoothing``."""

from __future__ import annotations

import hashlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from seht.commands.numbers import as_real, as_whole, shown
from seht.errors import unknown
from seht.lab.config import Recipe
from seht.lab.methods import METHODS
from seht.lab.methods.base import Method
from seht.lab.methods.combined import Combined

_PART = re.compile(r"\s*(?P<name>[^()\s]+)\s*(\((?P<options>[^()]*)\))?\s*")


@dataclass(frozen=True)
class Spec:
    """A method or a combination, as the user asked for it."""

    parts: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    """Names with the options that were given, in the user's order."""

    @property
    def text(self) -> str:
        """The canonical text; :func:`parse` reads it back."""
        return "+".join(
            name + (f"({','.join(f'{k}={_written(v)}' for k, v in options)})" if options else "")
            for name, options in self.parts
        )

    @property
    def slug(self) -> str:
        """A name for a directory: one for each text, safe on every file system."""
        text = self.text
        slug = re.sub(r"[(,]", "_", text.replace(")", ""))
        safe = re.sub(r"[^A-Za-z0-9._=+-]", "-", slug)
        if safe != slug or "_" in text or len(safe) > 100 or safe != safe.lower():
            safe = f"{safe[:80]}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return safe

    @property
    def names(self) -> tuple[str, ...]:
        """Without options."""
        return tuple(name for name, _ in self.parts)

    def fits(self, task: str) -> bool:
        """Whether every part makes sense for ``image`` or ``text``."""
        return all(task in METHODS[name].tasks for name in self.names)

    def build(self, recipe: Recipe) -> Combined:
        """The methods for a recipe: its settings go before defaults, the user's before both."""
        for name in self.names:
            if recipe.task not in METHODS[name].tasks:
                raise ValueError(
                    f"{name} works on {_kinds(METHODS[name])}, and recipe {recipe.name} is "
                    f"{recipe.task}; leave it out"
                )
        made: dict[str, Method] = {}
        for name, options in sorted(self.parts, key=lambda part: list(METHODS).index(part[0])):
            settings = _checked(name, recipe.settings.get(name, {}))
            made[name] = _make(name, {**settings, **dict(options)})
        return Combined(list(made.values()))

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Spec:
    """Read ``name(option=value,...)+name...``; a mistake is a :class:`ValueError` in one line."""
    parts: dict[str, tuple[tuple[str, Any], ...]] = {}
    for piece in _split(text, "+"):
        found = _PART.fullmatch(piece)
        if found is None:
            raise ValueError(f"cannot read method {piece!r}; write name or name(option=value,...)")
        name = found["name"]
        if name not in METHODS:
            raise ValueError(unknown("method", name, METHODS))
        given: dict[str, str] = {}
        for item in filter(None, map(str.strip, (found["options"] or "").split(","))):
            key, equals, value = map(str.strip, item.partition("="))
            if not equals or not value:
                raise ValueError(f"{name}: cannot read option {item!r}; write option=value")
            if key in given:
                raise ValueError(f"{name}: option {key} is given twice")
            given[key] = value
        if name in parts:
            raise ValueError(f"{name} is given twice in {text!r}; leave one out")
        checked = _checked(name, given)
        parts[name] = tuple((k, checked[k]) for k in options(name) if k in checked)
    spec = Spec(tuple(parts.items()))
    Combined([_make(name, dict(given)) for name, given in spec.parts])
    return spec


def split_list(text: str) -> list[str]:
    """Split ``a,b(c=1,d=2)+e`` at the commas outside parentheses."""
    return [piece.strip() for piece in _split(text, ",")]


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """A method's options: their type and default."""
    init = METHODS[name].__init__
    hints = typing.get_type_hints(init)
    return {
        key: (hints[key], parameter.default)
        for key, parameter in inspect.signature(init).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _split(text: str, separator: str) -> Iterator[str]:
    depth, piece = 0, ""
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and depth == 0:
            yield _some(piece, text)
            piece = ""
        else:
            piece += character
    if depth:
        raise ValueError(f"the parentheses in {text!r} do not match")
    yield _some(piece, text)


def _some(piece: str, text: str) -> str:
    if not piece.strip():
        raise ValueError(f"a method is missing in {text!r}")
    return piece


def _make(name: str, given: dict[str, Any]) -> Method:
    try:
        return METHODS[name](**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    known = options(name)
    for key in given:
        if key not in known:
            if not known:
                raise ValueError(f"{name} has no options, and {key!r} was given; leave it out")
            raise ValueError(f"{name}: {unknown('option', key, known)}")
    return {key: _converted(f"{name}: {key}", known[key][0], v) for key, v in given.items()}


_MOST = 10**12  # of steps or probes: beyond it torch's counters overflow
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def _converted(what: str, hint: Any, value: Any) -> Any:
    """The value in the type that the method asks for; numbers may come as text or as numbers."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and (value is None or str(value).lower() == "none"):
        return None
    kind, *more = (k for k in kinds if k is not type(None))
    if more:  # a number of steps, or a fraction of them
        with suppress(ValueError):
            return _converted(what, kind, value)
        return _converted(what, more[0], value)
    try:
        if kind is bool:
            return _BOOLEANS[str(value).lower()]
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        if isinstance(value, str) and kind in (int, float):
            value = as_whole(value) if kind is int else as_real(value)
        if kind is int and abs(value) > _MOST:
            raise ValueError
        return kind(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ValueError(f"{what} must be {_WORDS[kind]}, not {shown(str(value))}") from None


def _written(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _kinds(method: type[Method]) -> str:
    return " and ".join({"image": "images", "text": "text"}[task] for task in sorted(method.tasks))
