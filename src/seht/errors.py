"""Everything that is raised or warned of by name, and how a misspelt name is answered.

An error says in one line what is wrong and what to do about it. What only passes between two
modules of the library and never reaches a user is defined where it is caught.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 320
"""Characters of a list that is still read; of a longer one the nearest names are enough."""
_NEAREST = 6


class NonFiniteError(RuntimeError):
    """The loss or the estimate is not finite."""


class KinkError(RuntimeError):
    """An operation has a kink that the difference engine cannot freeze."""


class ExampleError(RuntimeError):
    """The loss is no sum over examples, or the examples cannot be told apart."""


class UnrepeatableError(RuntimeError):
    """The closure did something else when it ran again."""


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


class UsageError(Exception):
    """A mistake in the call of a command that its user can put right, said in one line."""


class PenaltyWarning(UserWarning):
    """The penalty does something its user should know of."""


def unknown(what: str, given: object, known: Iterable[object]) -> str:
    """A message that suggests what may have been meant, and what there is besides."""
    names = [str(name) for name in known]
    near = difflib.get_close_matches(str(given), names, n=_NEAREST, cutoff=0.0)
    close = near and difflib.SequenceMatcher(None, near[0], str(given)).ratio() >= 0.5
    hint = f"; did you mean {near[0]!r}?" if close else ""
    listed = f"known: {', '.join(names)}"
    if len(listed) > _LONGEST:
        listed = f"the nearest of {len(names)}: {', '.join(near)}"
    return f"unknown {what} {given!r}{hint} ({listed})"
