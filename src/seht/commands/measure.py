"""``seht measure``: every model's table on the terminal, JSON, and the page."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from seht import extras
from seht.commands.files import ReportFiles
from seht.commands.options import COUNT, SEED, add_options, real, whole
from seht.commands.outputs import plain_warnings
from seht.commands.targets import call_target, find_target
from seht.errors import PenaltyWarning, UsageError, one_line, unknown
from seht.measure import page
from seht.measure.data import kept
from seht.measure.survey import PARTS, Findings, Subject, SurveyPlan, choose_parts, survey, terminal
from seht.tensors.trees import is_batch

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
    text = "how flat is a model? trace, spectrum, landscape; a table and a page"
    parser = commands.add_parser("measure", help=text, description=MEASURE, epilog=MEASURE_EPILOG)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run's directory, its model.pt, or a comparison; a measurement's name; or a model "
        "of yours as with --model",
    )
    brings = "returns the model, (model, loss_fn), or what `seht doctor` takes; may be repeated"
    add_options(
        parser.add_argument_group("a model of your own"),
        ("--model module:function ...", brings),
        ("--data module:function", "returns a batch, a data set or batches"),
        ("--loss module:function", "loss_fn(model, batch), a mean over the batch"),
        ("--batch-dim N", "the examples' axis (default 0)", whole(-64, 63)),
    )
    add_options(
        parser.add_argument_group("what, and how well"),
        ("--what LIST ...", "measurements (default trace,layers)"),
        ("--curvature NAME", "hessian or ggn", str, "hessian"),
        ("--tol X", "relative standard error to reach", real(above=True)),
        ("--probes N", "replicates (default: as many as needed)", whole(1, COUNT)),
        ("--samples N", "examples for the trace (default all)", whole(1, SEED)),
        ("--few N", "examples for the rest (default 512)", whole(1, SEED), 512),
        ("--micro-batch N", "cut batches to this many examples", whole(1, SEED)),
        ("--seed N", "seed of the probes (default 0)", whole(0, SEED), 0),
    )
    add_options(
        parser.add_argument_group("for runs of the lab"),
        ("--split NAME", "train, valid or test", str, "train"),
        ("--data-dir DIR", "where the data is"),
    )
    add_options(
        parser.add_argument_group("output"),
        ("--json FILE", "every figure as JSON; - for standard output"),
        ("--html FILE", "a self-contained page of what was measured"),
    )
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
        raise UsageError(line or one_line(error)) from error
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
    files = ReportFiles(json_file, html_file)
    if "eigenvalues" in plan.parts:
        extras.need("measure", "eigenvalues", "scipy")  # now, not after the first model's gradient
    found = [survey(one, plan, progress=sys.stderr.isatty()) for one in subjects]
    record = {"plan": vars(plan), "models": [one.as_dict() for one in found]}
    files.write(terminal(found), record, partial(page.render, found, command))
    return found
