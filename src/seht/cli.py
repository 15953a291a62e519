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

from seht.lab.commands import add_compare, add_train

DESCRIPTION = "Hessian-trace regularisation for PyTorch, with a gradient that is right."
EPILOG = """\
examples:
  seht check train:example          can the penalty's gradient be trusted on my model?
  seht check train:example --json   the same for a program
  seht check --help                 what `example` has to return
  seht bench --fast                 what each estimator costs on this machine
  seht train digits --method seht-h train one method
  seht compare digits               every method, several seeds: the paper's table for your data
  seht measure runs/a runs/b        how flat are these models? a table and a page
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
MEASURE = """\
How flat is a model? The trace of the Hessian of its loss over a data set, with its error; layers,
largest and smallest eigenvalues, density, landscape and sharpness. For runs of `seht train` and
`seht compare`, or for any model and data of yours. Models are measured in evaluation mode.
"""
MEASURE_EPILOG = """\
measurements: trace, layers, eigenvalues (with stability and the largest stable learning rate),
density, landscape, sharpness, bound; or all

your own model and data:

  # mine.py
  def model():
      return net, loss_fn              # or net alone: cross-entropy for batches (inputs, classes)
  def data():
      return loader                    # or a data set, or one batch: loss_fn(net, batch) is a mean

  seht measure --model mine:model --data mine:data --what all --html flat.html

Several runs, or several --model, are measured side by side on the same directions.
Exit code 2: a mistake in the call, or a model that cannot be measured.
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
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "extras", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest  # a command of the lab takes any field of its recipe
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
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
        "what",
        nargs="?",
        choices=["penalty", "measure"],
        default="penalty",
        help="training with the penalty (default), or measuring a trace beside other packages",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="one of resnet18, resnet18-group, wrn, lstm, gpt, mlp; measure: resnet18, gpt "
        "(may be repeated)",
    )
    parser.add_argument("--fast", action="store_true", help="under five minutes, not an hour")
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="rounds of timing; measure: the others' products"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="measure: where the data is")
    parser.add_argument("--json", metavar="FILE", help="write every figure as JSON")
    parser.add_argument("--plot", metavar="FILE", help="plot cost against variance (.png, .svg)")
    parser.add_argument("--out", metavar="FILE", help="write the Markdown there, too")
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    if arguments.what == "measure":
        return _bench_measure(arguments)
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


def _bench_measure(arguments: argparse.Namespace) -> int:
    from seht.lab.bench.measuring.command import Command

    if arguments.plot is not None:
        raise UsageError("seht bench measure has no plot; leave --plot out")
    try:
        Command(
            arguments.model,
            arguments.fast,
            arguments.repeats,
            arguments.json,
            arguments.out,
            arguments.data_dir,
        ).run()
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
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


# --- seht measure -----------------------------------------------------------------------------


def add_measure(commands: Any) -> None:
    """``seht measure``."""
    parser = commands.add_parser(
        "measure",
        help="how flat is a model? trace, spectrum, landscape; a table and a page",
        description=MEASURE,
        epilog=MEASURE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="a run's directory, its model.pt, or a comparison"
    )
    own = parser.add_argument_group("a model of your own")
    own.add_argument(
        "--model",
        action="append",
        metavar="module:function",
        help="returns the model, or (model, loss_fn); may be repeated",
    )
    own.add_argument(
        "--data", metavar="module:function", help="returns a batch, a data set or batches"
    )
    own.add_argument(
        "--loss", metavar="module:function", help="loss_fn(model, batch), a mean over the batch"
    )
    own.add_argument("--batch-dim", type=int, metavar="N", help="the examples' axis (default 0)")
    what = parser.add_argument_group("what, and how well")
    what.add_argument(
        "--what",
        action="append",
        metavar="LIST",
        help="measurements (default trace,layers; with --html all)",
    )
    what.add_argument("--curvature", default="hessian", metavar="NAME", help="hessian or ggn")
    what.add_argument("--tol", type=float, metavar="X", help="relative standard error to reach")
    what.add_argument("--probes", type=int, metavar="N", help="replicates per micro-batch (2)")
    what.add_argument("--samples", type=int, metavar="N", help="read so many for the trace")
    what.add_argument(
        "--few", type=int, default=512, metavar="N", help="... and for everything else (512)"
    )
    what.add_argument("--micro-batch", type=int, metavar="N", help="cut batches into so many")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of probes and directions")
    where = parser.add_argument_group("for runs of the lab")
    where.add_argument("--split", default="train", metavar="NAME", help="train, valid or test")
    where.add_argument("--data-dir", metavar="DIR", help="where the data is")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="every figure as JSON; - for standard output")
    out.add_argument("--html", metavar="FILE", help="a self-contained page")
    parser.set_defaults(run=run_measure)


def run_measure(arguments: argparse.Namespace) -> int:
    """Gather the models, measure them, report."""
    import seht.measure.command as command
    from seht.measure.survey import Plan, choose_parts

    default = ["all"] if arguments.html else ["trace,layers"]
    try:
        plan = Plan(
            parts=choose_parts(arguments.what or default),
            curvature=arguments.curvature,
            tol=arguments.tol,
            probes=arguments.probes,
            samples=arguments.samples,
            few=arguments.few,
            micro_batch=arguments.micro_batch,
            seed=arguments.seed,
        )
        command.run(
            _subjects(arguments),
            plan,
            command=_call("measure", arguments),
            json_file=arguments.json,
            html_file=arguments.html,
        )
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    return 0


def _subjects(arguments: argparse.Namespace) -> list[Any]:
    from dataclasses import replace

    import seht.measure.command as command

    models = arguments.model or []
    if models and not arguments.data:
        raise UsageError("--model needs --data module:function, which returns what to measure on")
    if arguments.data and not models:
        raise UsageError("--data needs --model module:function; runs bring their own data")
    if not models and not arguments.runs:
        raise UsageError("give runs to measure, or --model and --data; see seht measure --help")
    found = []
    if arguments.runs:
        from seht.lab.measured import subjects

        found += subjects(arguments.runs, arguments.split, arguments.data_dir)
    loss = find_target(arguments.loss) if arguments.loss else None
    for target in models:
        one = command.subject(target, call_target(target), call_target(arguments.data), loss)
        found.append(replace(one, batch_dim=arguments.batch_dim))
    return found


def _call(name: str, arguments: argparse.Namespace) -> str:
    """The call as one could type it again."""
    import shlex

    return shlex.join(["seht", *(arguments.argv if hasattr(arguments, "argv") else [name])])


# --- shared by commands -----------------------------------------------------------------------


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
        raise UsageError(f"{target} is {_describe(found)}, not a function")
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


COMMANDS: tuple[Callable[[Any], None], ...] = (
    add_check,
    add_bench,
    add_train,
    add_compare,
    add_report,
    add_measure,
)
"""Every command's function; a new one is added here."""


if __name__ == "__main__":
    sys.exit(main())
