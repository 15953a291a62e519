"""``seht train RECIPE --method M``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from seht.commands.numbers import SEED, whole
from seht.commands.options import add_command, add_options
from seht.extras import need
from seht.lab.commands.arguments import OWN_HELP, add_shared
from seht.lab.commands.reading import chosen_recipe, execution_of, read, told

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
    parser = add_command(commands, "train", "train one method", TRAIN, TRAIN_EPILOG, **OWN_HELP)
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

    recipe, spec = read(lambda: (chosen_recipe(arguments), parse(arguments.method)))
    read(lambda: spec.build(recipe))  # fails before the first file is made
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
        from seht.lab.commands.outcome import outcome

        print(*outcome(result), sep="\n")
    print(out)
    return 0 if result.done else 1
