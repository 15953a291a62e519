"""``seht measure``: every model's table on the terminal, JSON, and the page."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seht
from seht import extras
from seht.commands.files import check_outputs, write
from seht.commands.numbers import COUNT, SEED, real, whole
from seht.commands.outputs import plain_warnings
from seht.commands.targets import call_target, find_target
from seht.errors import PenaltyWarning, UsageError, unknown
from seht.measure import page
from seht.measure.data import is_batch, kept
from seht.measure.survey import PARTS, Findings, Subject, SurveyPlan, choose_parts, survey
from seht.measure.table import terminal

MEASURE = """\
How flat is a model? The trace of the Hessian of its loss over a data set, with its error; layers,
largest and smallest eigenvalues, density, landscape, sharpness, and what rounded or noisy weights
cost. For runs of `seht train` and `seht compare`, or for any model and data of yours. Models are
measured in evaluation mode.
"""
MEASURE_EPILOG = """\
measurements: trace, layers, eigenvalues (with stability and the learning rate's limit), density,
landscape, sharpness, robustness, bound; or all. The page shows what was measured.

your own model and data:

  # mine.py
  def model():
      return net, loss_fn              # or net alone: cross-entropy for batches (inputs, classes)
  def data():
      return loader                    # or a data set, or one batch: loss_fn(net, batch) is a mean

  seht measure --model mine:model --data mine:data --what all --html flat.html
  seht measure robustness --model mine:model --data mine:data     # the same as --what robustness
  seht measure robustness train:example   # a function for `seht check` and `seht doctor` will do

Several runs, or several --model, are measured side by side on the same directions.
Exit code 2: a mistake in the call, or a model that cannot be measured.
"""
Runs = Callable[[Sequence[str], str, str | None], list[Subject]]
"""Reads runs: from their paths, a split and the data's directory."""


def add_measure(commands: Any, runs: Runs) -> None:
    """``seht measure``; ``runs`` reads those of the lab."""
    parser = commands.add_parser(
        "measure",
        help="how flat is a model? trace, spectrum, landscape; a table and a page",
        description=MEASURE,
        epilog=MEASURE_EPILOG,
    )

    def add(group: Any, *names: str, metavar: str = "N", **options: Any) -> None:
        group.add_argument(*names, metavar=metavar, **options)

    add(
        parser, "runs", nargs="*", metavar="RUN",
        help="a run's directory, its model.pt, or a comparison; a measurement's name; or a model "
        "of yours as with --model",
    )  # fmt: skip
    own, target = parser.add_argument_group("a model of your own"), "module:function"
    add(
        own, "--model", action="append", metavar=target,
        help="returns the model, (model, loss_fn), or what `seht doctor` takes; may be repeated",
    )  # fmt: skip
    add(own, "--data", metavar=target, help="returns a batch, a data set or batches")
    add(own, "--loss", metavar=target, help="loss_fn(model, batch), a mean over the batch")
    add(own, "--batch-dim", type=whole(-64, 63), help="the examples' axis (default 0)")
    what = parser.add_argument_group("what, and how well")
    add(
        what, "--what", action="append", metavar="LIST",
        help="measurements (default trace,layers)",
    )  # fmt: skip
    add(what, "--curvature", default="hessian", metavar="NAME", help="hessian or ggn")
    add(what, "--tol", type=real(above=True), metavar="X", help="relative standard error to reach")
    add(what, "--probes", type=whole(1, COUNT), help="replicates (default: as many as needed)")
    add(what, "--samples", type=whole(1, SEED), help="examples for the trace (default all)")
    add(what, "--few", type=whole(1, SEED), default=512, help="examples for the rest (default 512)")
    add(what, "--micro-batch", type=whole(1, SEED), help="cut batches to this many examples")
    add(what, "--seed", type=whole(0, SEED), default=0, help="seed of the probes (default 0)")
    where = parser.add_argument_group("for runs of the lab")
    add(where, "--split", default="train", metavar="NAME", help="train, valid or test")
    add(where, "--data-dir", metavar="DIR", help="where the data is")
    out = parser.add_argument_group("output")
    add(out, "--json", metavar="FILE", help="every figure as JSON; - for standard output")
    add(out, "--html", metavar="FILE", help="a self-contained page of what was measured")
    parser.set_defaults(run=lambda arguments: run_measure(arguments, runs), extra="measure")


def run_measure(arguments: argparse.Namespace, runs: Runs) -> int:
    """Gather the models, measure them, report."""
    given = [name for name in arguments.runs if not Path(name).exists()]
    named = [name for name in given if name in (*PARTS, "all")]
    own = [name for name in given if re.fullmatch(r"[\w.]+:[\w.]+", name)]
    asked = [*(arguments.what or []), *named] or ["trace,layers"]
    arguments.model = [*(arguments.model or []), *own]
    arguments.runs = [name for name in arguments.runs if name not in own]
    for name in arguments.runs:
        if not (name in named or Path(name).exists() or Path(name).name != name):
            raise UsageError(unknown("run or measurement", name, [*PARTS, "all"]))
    options = ("curvature", "tol", "probes", "samples", "few", "micro_batch", "seed")
    try:
        plan = SurveyPlan(choose_parts(asked), **{key: getattr(arguments, key) for key in options})
        arguments.runs = [path for path in arguments.runs if path not in named]
        command = shlex.join(["seht", *arguments.argv])
        with warnings.catch_warnings():
            plain_warnings(PenaltyWarning)
            report(_subjects(arguments, runs), plan, command, arguments.json, arguments.html)
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        line = None
        if isinstance(error, ImportError):
            line = extras.advice(error, "seht measure", "measure")
        raise UsageError(line or " ".join(str(error).split())) from error
    return 0


def _subjects(arguments: argparse.Namespace, runs: Runs) -> list[Subject]:
    models = arguments.model or []
    if arguments.data and not models:
        raise UsageError("--data needs --model module:function; runs bring their own data")
    if not models and not arguments.runs:
        raise UsageError("give runs to measure, or --model and --data; see seht measure --help")
    found = []
    if arguments.runs:
        found += runs(arguments.runs, arguments.split, arguments.data_dir)
    loss = find_target(arguments.loss) if arguments.loss else None
    for target in models:
        made = call_target(target)
        data = call_target(arguments.data) if arguments.data else None
        if isinstance(made, (tuple, list)) and len(made) in (3, 4):  # what check and doctor take
            made, data = made[:2], made[2] if data is None else data
        if data is None:
            raise UsageError(
                f"--model {target} needs --data module:function, which returns what to measure on; "
                "or let it return (model, loss_fn, data)"
            )
        one = _subject(target, made, data, loss)
        found.append(replace(one, batch_dim=arguments.batch_dim))
    return found


def _subject(name: str, made: Any, data: Any, loss_fn: Any) -> Subject:
    """From what the user's functions returned; ``TypeError`` where that is something else."""
    model = made
    if isinstance(made, (tuple, list)) and len(made) == 2:
        model, loss_fn = made[0], loss_fn or made[1]
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name} must return a torch.nn.Module or (model, loss_fn), not {type(made).__name__}"
        )
    data = kept(data)  # several measurements read it
    if not is_batch(data) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise TypeError(
            "the data's function must return a batch, a data set or an iterable of batches, "
            f"not {type(data).__name__}"
        )
    return Subject(name, model, loss_fn or cross_entropy, data)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss where none is given: of logits, for batches (inputs, classes)."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "without a loss function a batch must be (inputs, classes); let the model's function "
            "return (model, loss_fn), or give --loss module:function"
        )
    logits = model(batch[0])
    logits = logits[0] if isinstance(logits, tuple) else logits
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def report(
    subjects: Sequence[Subject],
    plan: SurveyPlan,
    command: str,
    json_file: str | None = None,
    html_file: str | None = None,
) -> list[Findings]:
    """Measure, print the table, write the files (each whole or not at all)."""
    check_outputs(json_file, html_file)
    if html_file is not None:
        extras.need("measure", "the page", "jinja2", "matplotlib")
    if "eigenvalues" in plan.parts:
        extras.need("measure", "eigenvalues", "scipy")  # now, not after the first model's gradient
    found = [survey(one, plan, progress=sys.stderr.isatty()) for one in subjects]
    if json_file is not None:
        models = [one.as_dict() for one in found]
        record = {"versions": dict(versions()), "plan": vars(plan), "models": models}
        text = json.dumps(record, indent=2, allow_nan=False)
        if json_file == "-":
            print(text)
        else:
            write(json_file, text + "\n")
    if json_file != "-":
        print(terminal(found))
    if html_file is not None:
        write(html_file, page.render(found, command, versions()))
        if json_file != "-":
            print(f"\n{html_file}")
    return found


def versions() -> list[tuple[str, str]]:
    """The versions that a figure may depend on."""
    python = platform.python_version()
    return [("seht", seht.__version__), ("torch", torch.__version__), ("Python", python)]
