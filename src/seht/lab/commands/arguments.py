"""What ``seht train`` and ``seht compare`` both take: a recipe's fields, and where a run goes.

Errors that the user can fix become one line.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from seht.commands.options import add_options, real
from seht.commands.outputs import plain_warnings
from seht.errors import one_line

if TYPE_CHECKING:
    from seht.lab.config import Recipe
    from seht.lab.trials import Execution

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

    head = f"  --{dotted:<20} {to_text(value):<12} "
    text = f"{kind}{'; ' if about else ''}{about}"
    if len(head) > _COLUMN:  # a long name or value has a line of its own
        head = f"{head.rstrip()}\n{' ' * _COLUMN}"
    lines = textwrap.wrap(text, _WIDTH - _COLUMN)
    return head + f"\n{' ' * _COLUMN}".join(lines)


# --- the recipe and the method of a command line ----------------------------------------------


def parsed(make: Callable[[], Any]) -> Any:
    """Parse user input; a mistake in it becomes a one-line error."""
    from seht.lab.records import RunError

    try:
        return make()
    except ValueError as error:
        raise RunError(one_line(error)) from error


def chosen_recipe(arguments: argparse.Namespace, name: str | None = None) -> Recipe:
    """The recipe of that name, with the fields that were given."""
    from seht.lab import recipes
    from seht.lab.data.own import sealed

    recipe = recipes.recipe(name or arguments.recipe)
    given = {
        key.removeprefix("field:"): value
        for key, value in vars(arguments).items()
        if key.startswith("field:") and value is not None
    }
    made = recipes.override(recipe, given | dict(_settings(arguments)))
    return sealed(made, arguments.data_dir)


_INTERNAL = frozenset({"argv", "command", "extra", "extras", "recipe", "rest", "run", "version"})


def _settings(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """``--settings.seht-d.weight 0.1`` and ``--settings.seht-d.weight=0.1``."""
    from seht.errors import unknown
    from seht.lab.fields import CHANGEABLE
    from seht.lab.methods import METHODS
    from seht.lab.methods.parse import options

    words = iter(arguments.rest)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--settings."):
            if not name.startswith("-"):
                raise ValueError(f"{word!r} is one argument too many; see seht COMMAND --help")
            own = [key for key in vars(arguments) if ":" not in key and key not in _INTERNAL]
            known = [f"--{option.replace('_', '-')}" for option in own]
            known += [f"--{field}" for field in [*CHANGEABLE, "settings.METHOD.OPTION"]]
            raise ValueError(unknown("option", name, known))
        if not equals:
            value = next(words, "")
        if not value:
            raise ValueError(f"{name} needs a value")
        # Checked here, because a setting of a method that does not run would never be looked at.
        method, dot, option = name.removeprefix("--settings.").rpartition(".")
        if dot and method not in METHODS:
            raise ValueError(unknown("method", method, METHODS))
        if dot and option not in options(method):
            raise ValueError(f"{method}: {unknown('option', option, options(method))}")
        yield name.removeprefix("--"), value


def execution_of(arguments: argparse.Namespace) -> Execution:
    """How runs are carried out."""
    from seht.lab.trials import Execution

    names = ("data_dir", "device", "save_every", "retry")
    return Execution(**{name: getattr(arguments, name) for name in names})


def told(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command so that errors the user can fix become one line and exit code 2."""

    def run(arguments: argparse.Namespace) -> int:
        from seht.errors import MissingExtraError
        from seht.lab.ranks import leads
        from seht.lab.records import RunError

        try:
            with warnings.catch_warnings():
                plain_warnings()
                return function(arguments)
        except (RunError, MissingExtraError):
            if not leads():
                return 2  # the first rank says it
            raise
        except KeyboardInterrupt:
            print(
                "\nseht: interrupted; the same command goes on from the last checkpoint (one is "
                "written every --save-every seconds)",
                file=sys.stderr,
            )
            return 130

    return run
