"""Errors that the user can fix become one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable


def told(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command so that errors the user can fix become one line and exit code 2."""

    def run(arguments: argparse.Namespace) -> int:
        from seht.errors import MissingExtraError, UsageError
        from seht.lab import progress
        from seht.lab.ranks import leads
        from seht.lab.records import RunError

        try:
            with warnings.catch_warnings():
                progress.plain_warnings()
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
