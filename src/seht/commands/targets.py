"""Functions in users' code, given to a command as ``module:function``; mistakes in one line."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from seht.errors import UsageError, nearest, one_line


def call_target(target: str) -> Any:
    """What ``module:function`` returns; the current directory is importable."""
    found = find_target(target)
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target}() raised {_where(error)}") from error


def call_example(target: str) -> tuple[Any, Any, Any, Any]:
    """Model, loss function, data and held-out data (or nothing), for ``check`` and ``doctor``."""
    given = call_target(target)
    if not isinstance(given, (tuple, list)) or len(given) not in (3, 4):
        raise UsageError(
            f"{target} must return (model, loss_fn, data) or (model, loss_fn, data, held_out), "
            f"not {describe(given)}"
        )
    model, loss_fn, data, *held_out = given
    return model, loss_fn, data, held_out[0] if held_out else None


def one_batch(data: Any) -> Any:
    """The first of a data set's, a loader's or a list's batches; anything else is one already."""
    from torch.utils.data import Dataset

    from seht.measure.data import Batches
    from seht.tensors.trees import is_batch

    # What can be moved to a device is a batch, also where one can iterate over it (a graph).
    whole = isinstance(data, (tuple, Mapping, str, bytes)) or hasattr(data, "to") or is_batch(data)
    if whole or not isinstance(data, (Dataset, Iterable)):
        return data
    found = next(iter(Batches(data)), None)
    if found is None:
        raise UsageError("data gives no batch: it is empty, or was read to its end before")
    return found[0]


def find_target(target: str) -> Any:
    """The function that ``module:function`` names."""
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise UsageError(f"{target!r} is not module:function, for example train:example")
    if os.sep in name or name.startswith(".") or name.endswith(".py"):
        folder, file = os.path.split(name)
        there = f"in {folder}, " if folder else ""
        raise UsageError(
            f"{name!r} is a path; {there}give the module as you would import it, without .py: "
            f"{file.removesuffix('.py').strip('.')}:{attribute}"
        )
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
                f"module {name!r} has no function {attribute!r}{nearest(part, dir(found))}"
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
    return f"{type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"


def describe(value: Any) -> str:
    """What it is, in words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"
