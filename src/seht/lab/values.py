"""Values in the type that an annotation asks for, from a user's text or from a record."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from seht.commands.numbers import as_real, as_whole, shown

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_READ: dict[Any, typing.Callable[[str], Any]] = {
    bool: lambda word: _BOOLEANS[word.lower()],
    int: as_whole,
    float: as_real,
    str: str,
    tuple: lambda word: tuple(as_whole(part) for part in word.split(",") if part.strip()),
}
_WORDS = {
    bool: "true or false",
    dict: "options by method",
    float: "a number",
    int: "a whole number",
    str: "a word",
    tuple: "whole numbers with commas",
}


def from_text(name: str, hint: Any, text: str) -> Any:
    """Parse a user's text; of several possible types the first that fits."""
    kinds, optional = _kinds(hint)
    word = text.strip()
    if optional and word.lower() == "none":
        return None
    for kind in kinds:
        with suppress(ValueError, KeyError):
            return _READ[kind](word)
    raise ValueError(f"{name} must be {words(hint)}, not {shown(text)}")


def to_text(value: Any) -> str:
    """The text of a value, which :func:`from_text` reads back."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def from_plain(name: str, hint: Any, value: Any) -> Any:
    """A value from a record, where an int may stand for a float, and a list for a tuple."""
    (kind, *_), optional = _kinds(hint)
    if optional and value is None:
        return None
    if kind is tuple and isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return tuple(value)
    if kind is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if kind is dict and isinstance(value, Mapping):
        if all(isinstance(options, Mapping) for options in value.values()):
            return {key: dict(options) for key, options in value.items()}
    elif type(value) is kind:
        return value
    raise ValueError(f"{name} must be {words(hint)}, not {value!r}")


def words(hint: Any) -> str:
    """``a whole number or none``."""
    kinds, optional = _kinds(hint)
    return _WORDS[kinds[-1]] + (" or none" if optional else "")


def _kinds(hint: Any) -> tuple[list[Any], bool]:
    """The types of an annotation that can be written down, and whether it may be ``None``."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [typing.get_origin(option) or option for option in options]
    return [kind for kind in kinds if kind in _WORDS], type(None) in options
