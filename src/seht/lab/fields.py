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
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from seht.commands.numbers import as_real, as_whole
from seht.errors import unknown
from seht.lab import config
from seht.lab.checking import check
from seht.lab.config import Recipe
from seht.lab.values import from_plain, from_text, words

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
_FIXED = ("name", "paper", "settings")  # settings are fields below, one for each option


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
        Field(name, words(hint), value, _help(type(owner).__name__).get(name.split(".")[-1], ""))
        for name, (owner, hint, value) in _leaves(recipe).items()
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
    known = _leaves(recipe)
    values = to_dict(recipe)
    changed = set()
    for name, text in changes.items():
        if name.startswith("settings."):
            method, dot, option = name.removeprefix("settings.").rpartition(".")
            if not (dot and method and option):
                raise ValueError(f"{name!r} is not settings.METHOD.OPTION")
            value = _literal(text)
            before = values["settings"].setdefault(method, {})
            if before.get(option) != value:
                changed.add(name)
            before[option] = value
            continue
        if name not in known:
            raise ValueError(unknown("field", name, [*known, "settings.METHOD.OPTION"]))
        value = from_text(name, known[name][1], text)
        if value != known[name][2]:
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
    return _without_later(recipe, to_dict(recipe), "")


def _without_later(kind: Any, values: dict[str, Any], prefix: str) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    kept = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(part := getattr(kind, name)):
            kept[name] = _without_later(part, value, f"{name}.")
        elif f"{prefix}{name}" not in _LATER or value != defaults[name]:
            kept[name] = value
    return kept


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values; what makes no sense is a :class:`ValueError` in one line."""
    recipe = _made(Recipe, values, "")
    assert isinstance(recipe, Recipe)
    check(recipe)
    return recipe


# --- types ------------------------------------------------------------------------------------


def _leaves(recipe: Recipe) -> dict[str, tuple[Any, Any, Any]]:
    """Owner, type and value of every field by its dotted name."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    for name, hint in typing.get_type_hints(Recipe).items():
        value = getattr(recipe, name)
        if dataclasses.is_dataclass(value):
            for leaf, kind in typing.get_type_hints(type(value)).items():
                found[f"{name}.{leaf}"] = (value, kind, getattr(value, leaf))
        elif name not in _FIXED:
            found[name] = (recipe, hint, value)
    return found


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


def _literal(text: str) -> Any:
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


@functools.cache
def _help(kind: str) -> dict[str, str]:
    """The strings below the fields of a dataclass in :mod:`seht.lab.config`."""
    found: dict[str, str] = {}
    tree = ast.parse(inspect.getsource(config))
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind)
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            text = " ".join(str(after.value.value).split()).replace("``", "")
            found[field.target.id] = text
    return found
