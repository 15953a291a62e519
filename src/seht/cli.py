"""The command ``seht``.

Each command is one function that adds its arguments to a parser and names the function that runs
it; :data:`COMMANDS` lists them. What a command needs is imported when it runs. Exit codes: 0, 1 if
the answer is "no" (a check that is not passed), 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

DESCRIPTION = "Hessian-trace regularisation for PyTorch, with a gradient that is right."
EPILOG = """\
examples:
  seht check train:example          can the penalty's gradient be trusted on my model?
  seht check train:example --json   the same for a program
  seht check --help                 what `example` has to return
  seht bench --fast                 what each estimator costs on this machine
  seht report DIR                   the table and the page of a comparison, made again
"""
CHECK = """\
Compare each engine's Hessian-trace penalty with differences of ordinary gradients, on a float64
copy of your own model and batch. Says in words whether the penalty's gradient can be trusted, and
which module breaks it if not.
"""
CHECK_EPILOG = """\
the function returns the model, the loss function and a batch:

  # train.py
  def example():
      model = Net().train()
      x, y = next(iter(loader))
      return model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y)

  seht check train:example

A small model and a batch of a few examples are enough: what is wrong is wrong at every size.
Exit code 0: every engine is trusted; 1: one is wrong, failed or inconclusive; 2: a mistake in the
call.
"""
BENCH = """\
Time, peak memory, error and variance of every estimator and engine beside a plain training step and
its rivals, on a ResNet-18, a Wide ResNet, an LSTM, a GPT and an MLP. Prints a Markdown report;
progress goes to standard error. Leave the machine alone while it runs.
"""
REPORT = """\
Write table.md, table.csv and the self-contained page report.html into a comparison's directory, and
print the table. Also works while a comparison is running: what is not done yet is listed as such.
"""


class UsageError(Exception):
    """Something the user can put right, said in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except UsageError as error:
        print(f"seht: error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="seht",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser


# --- seht check -------------------------------------------------------------------------------


def add_check(commands: Any) -> None:
    """``seht check module:function``."""
    parser = commands.add_parser(
        "check",
        help="can the penalty's gradient be trusted on your model?",
        description=CHECK,
        epilog=CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="module:function",
        help="returns (model, loss_fn, batch); the current directory is importable",
    )
    parser.add_argument(
        "--engine", action="append", metavar="NAME", help="check this one only (may be repeated)"
    )
    parser.add_argument(
        "--directions", type=int, default=3, metavar="N", help="random probes (default 3)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the probes (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Load the triple, check it, print the report."""
    triple = call_target(arguments.target)
    if not isinstance(triple, (tuple, list)) or len(triple) != 3:
        raise UsageError(
            f"{arguments.target} must return (model, loss_fn, batch), not {_describe(triple)}"
        )
    import seht

    try:
        report = seht.check(
            *triple,
            engines=arguments.engine,
            directions=arguments.directions,
            seed=arguments.seed,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0 if report.ok else 1


# --- seht bench -------------------------------------------------------------------------------


def add_bench(commands: Any) -> None:
    """``seht bench``."""
    parser = commands.add_parser(
        "bench",
        help="what each estimator costs, and what it is worth",
        description=BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="resnet18, wrn, lstm, gpt or mlp only (may be repeated)",
    )
    parser.add_argument("--fast", action="store_true", help="under five minutes, not an hour")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds of timing")
    parser.add_argument("--json", metavar="FILE", help="write every figure as JSON")
    parser.add_argument("--plot", metavar="FILE", help="plot cost against variance (.png, .svg)")
    parser.add_argument("--out", metavar="FILE", help="write the Markdown there, too")
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from seht.lab.bench.command import Command

    try:
        command = Command(
            arguments.model,
            arguments.fast,
            arguments.repeats,
            arguments.json,
            arguments.plot,
            arguments.out,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    command.run()
    return 0


# --- seht report ------------------------------------------------------------------------------


def add_report(commands: Any) -> None:
    """``seht report DIR``."""
    parser = commands.add_parser(
        "report",
        help="the table and the page of a comparison",
        description=REPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="what `seht compare --out` was given")
    parser.set_defaults(run=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Write the files, print the table and where the page is."""
    from seht.lab import report

    try:
        files = report.write(arguments.directory)
        report.show(arguments.directory)
    except report.ReportError as error:
        raise UsageError(str(error)) from error
    print(files["report.html"])
    return 0


# --- shared by commands -----------------------------------------------------------------------


def call_target(target: str) -> Any:
    """What ``module:function`` returns; the current directory is importable."""
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
        raise UsageError(f"{target} is {_describe(found)}, not a function")
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target}() raised {_where(error)}") from error


def _where(error: Exception) -> str:
    """An exception in one line, with the place in the user's code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({frame.filename}, line {frame.lineno})"


def _similar(owner: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, dir(owner), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"


class _Version(argparse.Action):
    """Prints seht's, torch's and Python's version: what a bug report needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        import seht

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"seht {seht.__version__} (torch {torch.__version__}, Python {python})")
        parser.exit(0)


COMMANDS: tuple[Callable[[Any], None], ...] = (add_check, add_bench, add_report)
"""Every command's function; a new one is added here."""


if __name__ == "__main__":
    sys.exit(main())
