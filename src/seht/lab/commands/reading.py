"""The recipe and the method of a command line; errors that the user can fix become one line."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from seht.commands.outputs import plain_warnings

if TYPE_CHECKING:
    from seht.lab.config import Recipe
    from seht.lab.trials import Execution


def read(make: Callable[[], Any]) -> Any:
    """Parse user input; a mistake in it becomes a one-line error."""
    from seht.lab.records import RunError

    try:
        return make()
    except ValueError as error:
        raise RunError(" ".join(str(error).split())) from error


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
        from seht.errors import MissingExtraError, UsageError
        from seht.lab.ranks import leads
        from seht.lab.records import RunError

        try:
            with warnings.catch_warnings():
                plain_warnings()
                return function(arguments)
        except (RunError, MissingExtraError) as error:
            if not leads():
                return 2  # the first rank says it
            raise UsageError(str(error)) from error
        except KeyboardInterrupt:
            print(
                "\nseht: interrupted; the same command goes on from the last checkpoint (one is "
                "written every --save-every seconds)",
                file=sys.stderr,
            )
            return 130

    return run
