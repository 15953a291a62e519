"""The rows of a comparison, from methods, alternatives or a preset."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from seht.lab.commands.reading import chosen_recipe

if TYPE_CHECKING:
    from seht.lab.compare import Entry
    from seht.lab.config import Recipe


def rows_of(arguments: argparse.Namespace) -> tuple[Recipe, list[list[Entry]]]:
    """The recipe, and for each row its candidates."""
    from seht.lab.methods import METHODS
    from seht.lab.methods.parse import read, split_list
    from seht.lab.search import BEST, candidates, expand

    if arguments.budget is not None and not arguments.grid:
        raise ValueError("--budget belongs to --grid; leave it out, or search with --grid")
    if arguments.preset is not None:
        return _preset(arguments)
    if arguments.small:
        raise ValueError("--small belongs to --preset; the small recipe is RECIPE-small")
    if arguments.recipe is None:
        raise ValueError("name a recipe, for example seht compare digits, or give --preset")
    recipe = chosen_recipe(arguments)
    if arguments.methods is None:
        texts = [name for name, method in METHODS.items() if recipe.task in method.tasks]
        texts.sort(key=lambda name: name != "weight-decay")
        texts += more(recipe) if arguments.grid else []
    else:
        texts = split_list(arguments.methods)
    waiting = [text for text in texts if arguments.grid and _over_decay(text)]
    if waiting and not any([*read(text)] == ["weight-decay"] for text in {*texts} - {*waiting}):
        raise ValueError(
            f"{waiting[0]} goes on top of what a row weight-decay finds, and there is none; add "
            "weight-decay to --methods"
        )
    rows = []
    for text in texts:
        if not arguments.grid and f"weight={BEST}" in text:
            raise ValueError(f"{text}: the best weight is what --grid finds; search with --grid")
        found = candidates(text, recipe, arguments.budget) if arguments.grid else expand(text)
        rows.append([_entry(recipe, candidate, over_decay=text in waiting) for candidate in found])
    slugs = [entry.slug for row in rows for entry in row]
    for row in rows:
        for entry in row:
            if slugs.count(entry.slug) > 1:
                raise ValueError(f"{entry.name} is given twice in --methods; leave one out")
    return recipe, rows


def _over_decay(text: str) -> bool:
    from seht.lab.methods.parse import read
    from seht.lab.search import BEST

    return read(text).get("weight-decay", {}).get("weight") == BEST


def more(recipe: Recipe) -> list[str]:
    """What a search compares beyond single methods: the Gauss-Newton trace, with a weight from the
    grid or tuned in the run, and what goes on top of the best weight decay.
    """
    usual = recipe.settings.get("seht-h", {}).get("curvature") == "ggn"
    found = ["seht-h(curvature=ggn,weight=tuned)"]
    found += [f"weight-decay(weight=best)+{name}" for name in ("seht-h(curvature=ggn)", "sam")]
    return found if usual else ["seht-h(curvature=ggn)", *found]


def _preset(arguments: argparse.Namespace) -> tuple[Recipe, list[list[Entry]]]:
    from seht.lab import presets, recipes

    if arguments.recipe is not None or arguments.methods is not None or arguments.grid:
        raise ValueError("--preset brings its own recipe and methods; leave the others out")
    preset = presets.preset(arguments.preset, arguments.small)
    recipe = chosen_recipe(arguments, preset.recipe)
    return recipe, [
        [_entry(recipes.override(recipe, row.changes), row.method, row.changes)]
        for row in preset.rows
    ]


def _entry(
    recipe: Recipe, text: str, changes: dict[str, str] | None = None, over_decay: bool = False
) -> Entry:
    from seht.lab.compare import Entry
    from seht.lab.methods.parse import parse

    spec = parse(text)
    spec.build(recipe)  # a method that does not fit should fail now, not after an hour
    said = ",".join(f"{name}={value}" for name, value in (changes or {}).items())
    return Entry(spec, recipe, said, over_decay)
