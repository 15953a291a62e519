"""``seht list``, and the same lists under the help of ``seht train`` and ``seht compare``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

WHAT = ("recipes", "methods", "presets")

LIST = """\
What `seht train` and `seht compare` can be asked for, a line each. A recipe is a data set, a
network and a schedule; a method is a way to regularise, with options in brackets and combined by
`+`; a preset is a table of the paper.
"""


def add_list(commands: Any) -> None:
    """``seht list``."""
    parser = commands.add_parser(
        "list", help="recipes, methods and presets, a line each", description=LIST
    )
    parser.add_argument("what", nargs="?", choices=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.set_defaults(run=run_list, extra="lab")


def run_list(arguments: argparse.Namespace) -> int:
    """Print them."""
    print(lists([arguments.what] if arguments.what else WHAT))
    return 0


def lists(what: Sequence[str]) -> str:
    """The lists of these kinds, each under its title."""
    return "\n\n".join("\n".join([f"{kind}:", *_lines(kind)]) for kind in what)


def _lines(kind: str) -> list[str]:
    rows = list(_rows(kind))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _rows(kind: str) -> Any:
    if kind == "presets":
        from seht.lab.paper import PRESETS

        return [(preset.name, f"{preset.help} ({preset.recipe})") for preset in PRESETS.values()]
    from seht.lab.methods import METHODS
    from seht.lab.recipes import RECIPES

    made: dict[str, Any] = dict(METHODS if kind == "methods" else RECIPES)
    return [(name, summary(thing)) for name, thing in made.items()]


def summary(thing: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].replace("``", "").split())
