"""A recipe's fields by dotted names: listed, changed from text, written and read back.

override(recipe("digits"), {"epochs": "3", "model.width": "8", "settings.seht-d.weight": "0.1"})
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from seht.commands.options import as_real, as_whole, shown
from seht.errors import unknown
from seht.lab.config import LEAVES, Recipe, check

# Changing one of these leaves it the paper's experiment: the machine, and what we hold out.
OURS = {"threads", "precision", "eval_batch", "data.validation", "spectrum", "robustness", "curve"}
# Fields that were added after runs had been recorded: at its default such a field is left out of a
# run's identity, so that older runs can still be resumed.
_LATER = frozenset(
    {
        "spectrum",
        "robustness",
        "curve",
        *(f"data.{name}" for name in ("within", "balanced", "noise", "noise_kind", "average")),
        *("data.file", "data.seal"),
        *(f"optim.{name}" for name in ("name", "beta2", "eps")),
        "model.heads",
    }
)
CHANGEABLE = [name for name in LEAVES if name not in ("name", "paper", "settings")]
"""The names of a recipe's own fields; settings are further ones, one for each option."""


class Field(NamedTuple):
    """One thing about a recipe that can be changed."""

    name: str
    """Dotted, such as ``model.width``."""
    type: str
    """In words, such as ``int`` or ``int or none``."""
    value: Any
    help: str


def fields(recipe: Recipe) -> list[Field]:
    """Every field of a recipe, and the settings it has for methods."""
    found = [
        Field(name, words(LEAVES[name].hint), LEAVES[name].of(recipe), _help(name))
        for name in CHANGEABLE
    ]
    for method, options in recipe.settings.items():
        for option, value in options.items():
            name, help = f"settings.{method}.{option}", f"Option of {method} in this recipe."
            found.append(Field(name, type(value).__name__, value, help))
    return found


def override(recipe: Recipe, changes: Mapping[str, str]) -> Recipe:
    """The recipe with these fields changed; values are text, as on the command line.

    The options of methods are ``settings.METHOD.OPTION``. What is no longer the paper's experiment
    loses its place beside the paper's figures.
    """
    values = to_dict(recipe)
    changed = set()
    for name, text in changes.items():
        if name.startswith("settings."):
            method, dot, option = name.removeprefix("settings.").rpartition(".")
            if not (dot and method and option):
                raise ValueError(f"{name!r} is not settings.METHOD.OPTION")
            value = literal(text)
            before = values["settings"].setdefault(method, {})
            if before.get(option) != value:
                changed.add(name)
            before[option] = value
            continue
        if name not in CHANGEABLE:
            raise ValueError(unknown("field", name, [*CHANGEABLE, "settings.METHOD.OPTION"]))
        value = from_text(name, LEAVES[name].hint, text)
        if value != LEAVES[name].of(recipe):
            changed.add(name)
        part, _, leaf = name.rpartition(".")
        (values[part] if part else values)[leaf] = value
    # Of a text data.validation cuts the test split too.
    if changed - (OURS - {"data.validation"} if recipe.task == "text" else OURS):
        values["paper"] = None
    return from_dict(values)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain values, for JSON; :func:`from_dict` is the inverse."""
    values = dataclasses.asdict(recipe)
    values["optim"]["milestones"] = list(values["optim"]["milestones"])
    return values


def identity(recipe: Recipe) -> dict[str, Any]:
    """The recipe as records of any version say it: without newer fields that have their default."""
    values = to_dict(recipe)
    for name in _LATER:
        part, _, leaf = name.rpartition(".")
        if LEAVES[name].of(recipe) == LEAVES[name].default:
            del (values[part] if part else values)[leaf]
    return values


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values; what makes no sense is a :class:`ValueError` in one line."""
    recipe = _made(Recipe, values, "")
    assert isinstance(recipe, Recipe)
    check(recipe)
    return recipe


# --- types ------------------------------------------------------------------------------------


def _made(kind: type[Any], values: Any, prefix: str) -> Any:
    """A dataclass from a mapping, and those inside it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a recipe's {prefix.rstrip('.') or 'content'} must be a mapping")
    hints = typing.get_type_hints(kind)
    if strange := sorted(set(values) - set(hints)):
        raise ValueError(unknown("field", prefix + strange[0], [prefix + name for name in hints]))
    made = {}
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        if name in values:
            inner = dataclasses.is_dataclass(hint) and isinstance(hint, type)
            if inner:
                made[name] = _made(hint, values[name], f"{prefix}{name}.")
            else:
                made[name] = from_plain(prefix + name, hint, values[name])
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"a recipe needs {prefix}{name}")
    return kind(**made)


def literal(text: str) -> Any:
    """The value of an option, whose type only its method knows: a number, a truth value, a word."""
    if (word := text.strip()).lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[word.lower()]
    for read in (as_whole, as_real):
        try:
            value = read(word)
        except ValueError:
            continue
        # No record can hold another number; as a word it is refused by the method.
        return value if math.isfinite(value) else word
    return word


def _help(name: str) -> str:
    """The string below a field in :mod:`seht.lab.config`."""
    return _texts(LEAVES[name].owner).get(name.rpartition(".")[2], "")


@functools.cache
def _texts(kind: type[Any]) -> dict[str, str]:
    """The string below each field of a dataclass."""
    found: dict[str, str] = {}
    (tree,) = ast.parse(inspect.getsource(kind)).body
    for field, after in itertools.pairwise(tree.body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            found[ast.unparse(field.target)] = " ".join(text.split()).replace("``", "")
    return found


# --- values in the type that an annotation asks for -------------------------------------------

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
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
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
