"""What is measured at the end of a run, the only time that the test set is read."""

from __future__ import annotations

import math
from typing import Any

from seht.lab.evaluate import LOSS_EXAMPLES, LOSS_TOKENS, in_float, judging
from seht.lab.methods.loss import plain_loss
from seht.lab.robustness import NOISE, robustness
from seht.lab.spectrum import EXAMPLES
from seht.lab.training import Training


class DivergedError(ArithmeticError):
    """The loss is not finite any more."""


def measures(task: str) -> tuple[str, ...]:
    """The names of the figures that are measured on a split; methods are compared by the second."""
    return ("loss", "perplexity") if task == "text" else ("loss", "top1", "top5")


def figures(training: Training, row: dict[str, Any], test: bool) -> dict[str, float]:
    """The figures of the present weights: validation (known) and, with ``test``, the test set."""
    valid = {f"valid_{name}": row[f"valid_{name}"] for name in measures(training.recipe.task)}
    found = {name: value for name, value in valid.items() if value is not None}
    if test:
        figures = training.evaluated("test")
        if not math.isfinite(figures["loss"]):
            raise DivergedError(f"the test loss is {figures['loss']} after epoch {row['epoch']}")
        found |= {f"test_{name}": value for name, value in figures.items()}
    return found


def curve(training: Training) -> dict[str, float]:
    """The test accuracy after an epoch, for the curve."""
    key = measures(training.recipe.task)[1]
    return {f"test_{key}": training.evaluated("test")[key]}


def robust(training: Training, which: str, test: bool) -> dict[str, float]:
    """How much the test figures suffer from rounded and disturbed weights.

    Measured with the weights that the report compares: ``best`` for text, otherwise ``last``.
    """
    recipe = training.recipe
    text = recipe.task == "text"
    if not (test and recipe.robustness and which == ("best" if text else "last")):
        return {}
    key = measures(recipe.task)[1]
    found = robustness(training.bare, lambda: training.evaluated("test")[key], training.seed)
    return {f"test_{key}_{name}": value for name, value in found.items()} | rises(training)


def rises(training: Training) -> dict[str, float]:
    """What weight noise adds to the training loss, and what the trace says it should add."""
    import seht

    model, text = in_float(training.bare), training.recipe.task == "text"
    shares = [share / 100 for share in NOISE]
    batches = list(training.data.eval_batches("train", EXAMPLES))
    with judging(model):
        measured = seht.measure.robustness(
            model,
            plain_loss,
            batches,
            bits=(),
            noise=shares,
            seed=training.seed,
            batch_dim=int(text),
        )
    found = {}
    for share, noise in zip(NOISE, measured.noise.values(), strict=True):
        found[f"train_rise_noise{share}"] = noise.rise
        found[f"train_rise_noise{share}_predicted"] = noise.predicted
    return {name: value for name, value in found.items() if math.isfinite(value)}


def train_loss(training: Training) -> float:
    """The plain cross-entropy in eval mode, as on the other splits; text from its start."""
    most = LOSS_TOKENS if training.recipe.task == "text" else LOSS_EXAMPLES
    return training.evaluated("train", most)["loss"]
