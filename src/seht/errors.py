"""The exceptions and warnings that users can catch, and the message for a misspelt name.

An error says in one line what is wrong and what to do about it. Exceptions that never reach a user
are defined in the module that catches them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 320
"""A list of known names longer than this many characters is cut to the nearest ones."""
_NEAREST = 6


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


def unknown(what: str, given: object, known: Iterable[object]) -> str:
    """The message for an unknown name: the nearest known one, and a list of all."""
    names = [str(name) for name in known]
    near = difflib.get_close_matches(str(given), names, n=_NEAREST, cutoff=0.0)
    close = near and difflib.SequenceMatcher(None, near[0], str(given)).ratio() >= 0.5
    hint = f"; did you mean {near[0]!r}?" if close else ""
    listed = f"known: {', '.join(names)}"
    if len(listed) > _LONGEST:
        listed = f"the nearest of {len(names)}: {', '.join(near)}"
    return f"unknown {what} {given!r}{hint} ({listed})"
