"""``seht train RECIPE --method M``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from seht.commands.options import SEED, add_options, whole
from seht.extras import need
from seht.lab.commands.arguments import (
    OWN_HELP,
    add_shared,
    chosen_recipe,
    execution_of,
    parsed,
    told,
)
from seht.lab.records import Result
from seht.measure.numbers import aligned, number, with_error

TRAIN = """\
Train one method on one recipe. The run is kept in a directory: killed and started again, the same
command goes on and ends with the same figures.
"""
TRAIN_EPILOG = """\
examples:
  seht train digits --method 'seht-h(curvature=ggn,weight=1e-3)'
  seht train cifar10-small --method seht-d+label-smoothing --seed 3 --epochs 5 --model.width 8
  seht train digits --help          every field of the recipe with its value

Every field of the recipe is an option; --settings.METHOD.OPTION VALUE sets a method's.
"""


def add_train(commands: Any) -> None:
    """``seht train RECIPE --method M``."""
    parser = commands.add_parser(
        "train", help="train one method", description=TRAIN, epilog=TRAIN_EPILOG, **OWN_HELP
    )
    several = "processes that share every batch (DDP), one for each device (default: 1)"
    add_options(
        parser,
        ("recipe RECIPE", "its name, for example digits"),
        ("--method M", "the method (default: weight-decay)", str, "weight-decay"),
        ("--seed N", "the run's seed (default: 0)", whole(0, SEED), 0),
        ("--devices N", several, whole(1, 1024), 1),
    )
    add_shared(parser, "runs/train/RECIPE/METHOD/seed-N")
    parser.set_defaults(run=run_train, extra="lab")


@told
def run_train(arguments: argparse.Namespace) -> int:
    """Train, and say where the results are."""
    need("lab", "seht train")
    from seht.lab import progress
    from seht.lab.methods.parse import parse
    from seht.lab.ranks import leads

    recipe, spec = parsed(lambda: (chosen_recipe(arguments), parse(arguments.method)))
    parsed(lambda: spec.build(recipe))  # fails before the first file is made
    default = Path("runs", "train", recipe.name, spec.slug, f"seed-{arguments.seed}")
    out = Path(arguments.out or default)
    from seht.lab.trials import Trial

    trial = Trial(recipe, spec, arguments.seed, out, execution=execution_of(arguments))
    result = trial.run(progress.make(trial.name), patience=0.0, devices=arguments.devices)
    if not leads():
        return 0 if result.done else 1
    if not result.done:
        print(f"failed: {result.reason}")
    if result.metrics:
        print(*outcome(result), sep="\n")
    print(out)
    return 0 if result.done else 1


# --- the figures of a run as a table ----------------------------------------------------------

_PARTS = {"valid": "validation", "test": "test"}
_FIGURES = {
    "loss": "loss",
    "top1": "accuracy, %",
    "top5": "top-5 accuracy, %",
    "perplexity": "perplexity",
    "ece": "calibration error, %",
}
_NAME = re.compile(
    r"(?P<part>valid|test)_(?P<figure>[a-z]+\d?)(_(?P<bits>\d+)bit|_noise(?P<noise>\d+))?"
    r"|train_rise_noise(?P<rise>\d+)(?P<predicted>_predicted)?"
)


def outcome(result: Result) -> list[str]:
    """The lines of a table: a row for each figure, with the last weights and the best ones."""
    last, best = (result.metrics.get(which, {}) for which in ("last", "best"))
    heads = ["last epoch", "best epoch"]
    if "epoch" in best:
        heads[1] += f" ({best['epoch']:g})"
    rows = [
        [_words(name), *(number(found[name], 4) if name in found else "" for found in (last, best))]
        for name in dict.fromkeys((*last, *best))
        if name != "epoch" and not (name.endswith("top5") and last.get(name) == 100)
    ]
    if result.train_loss is not None:
        rows.append(["training loss", number(result.train_loss, 4), ""])
    if result.trace is not None:
        trace = with_error(result.trace["estimate"], result.trace["stderr"])
        rows.append(["trace", trace, ""])
    if result.weight_norm is not None:
        rows.append(["weight norm", number(result.weight_norm, 4), ""])
    return aligned([["", *heads], *rows])


def _words(name: str) -> str:
    """A figure's name in ``result.json``, as one says it; unknown ones as they are."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    if found["rise"]:
        said = f"training loss: rise at {found['rise']} % noise"
        return f"{said}, by the trace" if found["predicted"] else said
    figure, comma, unit = _FIGURES.get(found["figure"], found["figure"]).rpartition(", ")
    said = f"{_PARTS[found['part']]} {figure or unit}"
    if found["bits"]:
        said += f" at {found['bits']} bits"
    elif found["noise"]:
        said += f" with {found['noise']} % noise"
    return f"{said}, {unit}" if comma else said
