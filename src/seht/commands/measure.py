"""``seht measure``."""

from __future__ import annotations

import argparse
from typing import Any

from seht import extras
from seht.commands.numbers import COUNT, SEED, real, whole
from seht.commands.targets import call_target, find_target
from seht.errors import UsageError

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
    own.add_argument(
        "--batch-dim", type=whole(-64, 63), metavar="N", help="the examples' axis (default 0)"
    )
    what = parser.add_argument_group("what, and how well")
    what.add_argument(
        "--what",
        action="append",
        metavar="LIST",
        help="measurements (default trace,layers; with --html all)",
    )
    what.add_argument("--curvature", default="hessian", metavar="NAME", help="hessian or ggn")
    what.add_argument(
        "--tol", type=real(above=True), metavar="X", help="relative standard error to reach"
    )
    what.add_argument(
        "--probes", type=whole(1, COUNT), metavar="N", help="replicates per micro-batch (2)"
    )
    what.add_argument(
        "--samples", type=whole(1, SEED), metavar="N", help="read so many for the trace"
    )
    what.add_argument(
        "--few",
        type=whole(1, SEED),
        default=512,
        metavar="N",
        help="... and for everything else (512)",
    )
    what.add_argument(
        "--micro-batch", type=whole(1, SEED), metavar="N", help="cut batches into so many"
    )
    what.add_argument(
        "--seed", type=whole(0, SEED), default=0, metavar="N", help="of probes and directions"
    )
    where = parser.add_argument_group("for runs of the lab")
    where.add_argument("--split", default="train", metavar="NAME", help="train, valid or test")
    where.add_argument("--data-dir", metavar="DIR", help="where the data is")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="every figure as JSON; - for standard output")
    out.add_argument("--html", metavar="FILE", help="a self-contained page")
    parser.set_defaults(run=run_measure, extra="measure")


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
        line = None
        if isinstance(error, ImportError):
            line = extras.advice(error, "seht measure", "measure")
        raise UsageError(line or " ".join(str(error).split())) from error
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
