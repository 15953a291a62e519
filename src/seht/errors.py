"""The exceptions and warnings that users can catch; answers to a misspelt name or a bad number.

An error says in one line what is wrong and what to do about it. Exceptions that never reach a user
are defined in the module that catches them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_LONGEST = 320
"""A list of known names longer than this many characters is cut to the nearest ones."""
_NEAREST = 6
_LINE = 600


class NonFiniteError(RuntimeError):
    """The loss or the trace is NaN or infinite; ``on_nonfinite="skip"`` leaves the penalty out."""


class KinkError(RuntimeError):
    """The model uses an operation with a kink that the difference engine has no rule for.

    Teach it one with :func:`seht.register_kink`, or use ``engine="autograd"``.
    """


class ExampleError(RuntimeError):
    """SEHT-S needs a loss that is a sum over examples, and this one mixes them before the sum."""


class UnrepeatableError(RuntimeError):
    """The closure computed something else when it ran again, such as the loss of another batch."""


class MissingExtraError(ImportError):
    """A package of an extra, such as ``seht[measure]``, is not installed."""


class UsageError(Exception):
    """A mistake in a command line, which becomes one line of text and exit code 2."""


class PenaltyWarning(UserWarning):
    """The penalty is probably not doing what its user wants: too weak, too strong, not in use."""


def warn(message: str) -> None:
    """Warn, pointing at the user's line: the first one outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _module(frame).split(".")[0] == "seht":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PenaltyWarning, stacklevel=level)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""  # code that is run by exec() has none


def nearest(given: object, known: Iterable[str], beside: str = "") -> str:
    """The end of a message about an unknown name: the known one that was probably meant, if any.

    What they all begin with, dashes say, is ``beside`` the point.
    """
    bare = {name.lstrip(beside) if beside else name: name for name in known}
    wanted = str(given).lstrip(beside) if beside else str(given)
    near = difflib.get_close_matches(wanted, list(bare), n=1, cutoff=0.5)
    return f"; did you mean {bare[near[0]]!r}?" if near else ""


def one_line(error: BaseException) -> str:
    """What an exception says, or its kind, without line breaks and without end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."


def brief(error: BaseException) -> str:
    """The kind of an exception, and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def unknown(what: str, given: object, known: Iterable[object], beside: str = "") -> str:
    """The message for an unknown name: the nearest known one, and a list of all."""
    names = [str(name) for name in known]
    listed = f"known: {', '.join(names)}"
    if len(listed) > _LONGEST:
        near = difflib.get_close_matches(str(given), names, n=_NEAREST, cutoff=0.0)
        listed = f"the nearest of {len(names)}: {', '.join(near)}"
    return f"unknown {what} {given!r}{nearest(given, names, beside)} ({listed})"


def options_of(function: Callable[..., object]) -> list[str]:
    """The names of a function's keyword-only arguments."""
    given = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in given if parameter.kind is parameter.KEYWORD_ONLY]


def check_options(
    function: Callable[..., object], options: Iterable[str], *more: Iterable[str]
) -> None:
    """Refuse what a function does not take among its ``**options``: beside its own arguments it
    takes ``more``. Python would name an inner function, and list nothing.
    """
    known = [*options_of(function), *(name for names in more for name in names)]
    for option in options:
        if option not in known:
            raise TypeError(f"{function.__name__}(): {unknown('option', option, known)}")


def check_count(name: str, value: object, least: int = 1, *, optional: bool = False) -> None:
    """Refuse everything but whole numbers of at least ``least``."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_positive(name: str, value: Any, *, optional: bool = False) -> None:
    """Refuse everything but finite numbers above 0."""
    if value is None and optional:
        return
    said = f"{name} must be a positive finite number, not {value!r}"
    try:
        fine = math.isfinite(value) and value > 0
    except TypeError:
        raise TypeError(said) from None
    if isinstance(value, bool):
        raise TypeError(said)
    if not fine:
        raise ValueError(said)
