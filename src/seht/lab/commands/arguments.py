"""What ``seht train`` and ``seht compare`` both take: a recipe's fields, and where a run goes."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from seht.commands.numbers import real
from seht.commands.options import add_options

_WIDTH, _COLUMN = 100, 38
"""Of the list of fields, and where its words begin."""

OWN_HELP: dict[str, Any] = {"allow_abbrev": False, "add_help": False}
"""Of a command that takes any field of its recipe: :func:`add_shared` adds its help."""
POWER = (
    "--power SIZE",
    "also say how many seeds a difference of that size needs, for example 1.0",
    real(above=True),
)


def add_shared(parser: Any, default: str) -> None:
    """The options of both, and every field of a recipe."""
    add_options(
        parser,
        ("--out DIR", f"for the results (default: {default})"),
        ("--data-dir DIR", "where to look for the data first"),
        ("--device NAME", "auto, cpu, cuda (default: auto)", str, "auto"),
        ("--save-every SECONDS", "time between two checkpoints (default: 30)", real(), 30.0),
        ("--retry", "run again what has failed"),
    )
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs=0,
        help="this, recipes and methods; after a recipe, its fields",
    )
    from seht.lab.fields import CHANGEABLE

    for name in CHANGEABLE:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=f"field:{name}", default=None, help=argparse.SUPPRESS)
    parser.set_defaults(extras=True)


class _Help(argparse.Action):
    """The usual help, what can be asked for and, after a recipe's name, its fields instead."""

    def __call__(self, parser: Any, namespace: Any, *_: Any) -> None:
        parser.print_help()
        name = getattr(namespace, "recipe", None)
        if name is None:
            from seht.lab.commands.listing import WHAT, lists

            print("\n" + lists(WHAT if hasattr(namespace, "preset") else WHAT[:2]))
        else:
            from seht.lab import recipes

            try:
                recipe = recipes.recipe(name)
            except ValueError as error:
                parser.error(str(error))
            print(f"\nfields of {name}:")
            for field in recipes.fields(recipe):
                print(_described(*field))
        parser.exit(0)


def _described(dotted: str, kind: str, value: Any, about: str) -> str:
    """A field with its value as one would type it, and what it means in a column of its own."""
    from seht.lab.fields import to_text

    shown = ",".join(map(str, value)) if isinstance(value, tuple) else to_text(value)
    head = f"  --{dotted:<20} {shown:<12} "
    text = f"{kind}{'; ' if about else ''}{about}"
    if len(head) > _COLUMN:  # a long name or value has a line of its own
        head = f"{head.rstrip()}\n{' ' * _COLUMN}"
    lines = textwrap.wrap(text, _WIDTH - _COLUMN)
    return head + f"\n{' ' * _COLUMN}".join(lines)
