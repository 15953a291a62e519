"""What commands take from users' code: ``module:function``, and mistakes in one line."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from seht.errors import UsageError


def call_target(target: str) -> Any:
    """What ``module:function`` returns; the current directory is importable."""
    found = find_target(target)
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target}() raised {_where(error)}") from error


def find_target(target: str) -> Any:
    """The function that ``module:function`` names."""
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise UsageError(f"{target!r} is not module:function, for example train:example")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(
                f"there is no module {error.name!r} in {os.getcwd()} or among the installed "
                "packages; give it as you would import it, without .py"
            ) from error
        raise UsageError(f"module {name!r} cannot be imported: {_where(error)}") from error
    except Exception as error:
        raise UsageError(f"module {name!r} cannot be imported: {_where(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"module {name!r} has no function {attribute!r}{_similar(found, part)}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(
            f"{target} is {describe(found)}, not a function; write one that returns it"
        )
    return found


def _where(error: Exception) -> str:
    """An exception in one line, with the place in the user's code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({frame.filename}, line {frame.lineno})"


def _similar(owner: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, dir(owner), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def describe(value: Any) -> str:
    """What it is, in words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"
