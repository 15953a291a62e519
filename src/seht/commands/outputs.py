"""Standard output and error when writing fails: a closed pipe, a full disk."""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
import warnings
from collections.abc import Sequence
from typing import IO, Any, NoReturn

from seht.errors import unknown

GONE = 141
"""The exit code if the reader of a pipe is gone: that of a process ended by SIGPIPE.

The signal itself is not let through: a worker or a connection that is gone would end us, too."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full disk or quota, or of a failed device."""


class Parser(argparse.ArgumentParser):
    """Argparse's parser, but a mistake is one line, without the whole usage before it, and
    a failure to write the help is not swallowed.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter  # texts have their own lines
        super().__init__(*arguments, **{"formatter_class": raw, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Unknown arguments are left over for a command with ``extras`` alone."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and not getattr(found, "extras", False):
            name = rest[0].partition("=")[0]
            if name.startswith("-"):
                known = [option for option in self._option_string_actions if option[:2] == "--"]
                self.error(unknown("option", name, known, beside="-"))
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown("choice", value, action.choices))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where to read on; exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help says more)\n")

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """To ``file`` or standard output."""
        print(self.format_help(), end="", file=file or sys.stdout)


def plain_warnings(kind: type[Warning] = Warning) -> None:
    """Show warnings of this kind to the person at the terminal without the line that gave them.

    ``warnings.catch_warnings`` around it puts the usual way back.
    """
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **named: Any) -> None:
        if issubclass(category, kind):
            print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            usual(message, category, *place, **named)

    warnings.showwarning = show


def flush() -> None:
    """Write what is left now: when Python ends it is too late to say anything about a failure."""
    for stream in _streams():
        stream.flush()


def lost(error: OSError) -> str | None:
    """Why output was lost, ``""`` if its reader is gone; ``None`` for any other error.

    Afterwards what cannot be written goes nowhere, so that the end of Python does not try again.
    """
    full = error.errno in FULL and error.filename is None  # files are written under their names
    said = f"cannot write: {error.strerror}" if full else None
    for stream in _streams():
        if isinstance(error, BrokenPipeError) and _left(stream):
            said = ""
            _discard(stream)
        try:
            stream.flush()
        except OSError:
            _discard(stream)
    return said


def _streams() -> list[IO[str]]:
    return [s for s in (sys.stdout, sys.stderr) if s is not None and not s.closed]


def _discard(stream: IO[str]) -> None:
    number = _number(stream)
    if number is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _left(stream: Any) -> bool:
    number = _number(stream)
    if number is None:
        return False
    if not hasattr(select, "poll"):  # Windows: only its streams can have been meant
        return True
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _number(stream: Any) -> int | None:
    """The system's number of a stream; ``None`` for one in memory, or none at all."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
