"""The command ``seht``.

Each command is a file in :mod:`seht.commands` or, for the lab's, in :mod:`seht.lab.commands`, with
one function that adds its arguments to a parser and names the function that runs it;
:data:`COMMANDS` lists them. What a command needs is imported when it runs. Exit codes: 0, 1 if the
answer is "no" (a check that is not passed), 2 for a mistake in the call, 141 where nobody reads the
output any more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from seht import extras
from seht.commands import outputs
from seht.commands.check import add_check
from seht.commands.doctor import add_doctor
from seht.commands.measure import add_measure
from seht.errors import UsageError
from seht.lab.commands.bench import add_bench
from seht.lab.commands.compare import add_compare
from seht.lab.commands.listing import add_list
from seht.lab.commands.report import add_report
from seht.lab.commands.train import add_train
from seht.measure.survey import Subject

DESCRIPTION = "Hessian-trace regularisation for PyTorch, with a gradient that is right."
EPILOG = """\
examples:
  seht check train:example          can the penalty's gradient be trusted on my model?
  seht check train:example --json   the same for a program
  seht doctor train:example         which curvature, weight and cost; does it memorise? two lines
  seht check --help                 what `example` has to return
  seht bench --fast                 what each estimator costs on this machine
  seht list                         recipes, methods and presets, a line each
  seht train digits --method seht-h train one method
  seht compare digits               every method, several seeds, a table with intervals
  seht measure runs/a runs/b        how flat are these models? a table and a page
  seht report DIR                   the table and the page of a comparison, made again
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        try:
            return _run(argv)
        finally:
            outputs.flush()
    except OSError as error:
        lost = outputs.lost(error)
        if lost is None:
            raise  # the failure is not about our own output
        return outputs.GONE if lost == "" else _complain(lost)


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    arguments.rest = rest  # a command of the lab takes any field of its recipe
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    if arguments.run is None:
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except UsageError as error:
        return _complain(str(error))
    except ImportError as error:
        line = extras.advice(error, f"seht {arguments.command}", arguments.extra)
        if line is None:
            raise
        return _complain(line)


def _complain(line: str) -> int:
    print(f"seht: error: {line}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = outputs.Parser(
        prog="seht",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    parser.set_defaults(run=None, extra=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for add in COMMANDS:
        add(commands)
    return parser


class _Version(argparse.Action):
    """Prints seht's, torch's and Python's version: what a bug report needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        import seht

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"seht {seht.__version__} (torch {torch.__version__}, Python {python})")
        parser.exit(0)


def _runs(paths: Sequence[str], split: str, data_dir: str | None) -> list[Subject]:
    """Read the lab's runs for ``seht measure``, which itself must not import the lab."""
    from seht.lab.measured import subjects

    return subjects(paths, split, data_dir)


COMMANDS: tuple[Callable[[Any], None], ...] = (
    add_check,
    add_doctor,
    add_bench,
    add_train,
    add_compare,
    add_report,
    add_list,
    lambda commands: add_measure(commands, _runs),
)
"""Every command's function; a new one is added here."""


if __name__ == "__main__":
    sys.exit(main())
