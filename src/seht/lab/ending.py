"""What is measured at the end of a run, the only time that the test set is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seht.errors import one_line
from seht.lab.data.examples import generator
from seht.lab.evaluate import LOSS_EXAMPLES, LOSS_TOKENS, in_float, judging
from seht.lab.methods.base import Batch
from seht.lab.methods.loss import plain_loss
from seht.lab.methods.weights import exchanged
from seht.lab.training import Training
from seht.measure.robustness import rounded

BITS = (8, 4, 3)
NOISE = (1, 3, 10)
"""Per cent of each tensor's root mean square."""
EXAMPLES = 200
"""Training images for derivatives; of text a stretch of every stream, or as many as reach so many
tokens."""
TOLERANCE = 0.05
"""Of the spectrum: the residual that is asked for, relative to the eigenvalue."""
MEMORY = 4 * 2**30
"""Bytes that the vectors of the search may take."""


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


# --- rounded and disturbed weights ------------------------------------------------------------

# Both act on the weights of two or more dimensions; biases and norms stay as they are.


def robustness(model: nn.Module, measure: Callable[[], float], seed: int) -> dict[str, float]:
    """The measure by what was done to the weights: ``8bit`` ... ``noise10``.

    What is not finite is left out.
    """
    changes: dict[str, Callable[[Tensor], Tensor]]
    changes = {f"{bits}bit": partial(rounded, bits=bits) for bits in BITS}
    for share in NOISE:
        draw = generator(seed, "weight noise", share)
        changes[f"noise{share}"] = partial(disturbed, share=share / 100, draw=draw)
    weights = {name: w.detach() for name, w in model.named_parameters() if w.dim() >= 2}
    found = {}
    for what, change in changes.items():
        with exchanged(model, {name: change(weight) for name, weight in weights.items()}):
            found[what] = measure()
    return {what: value for what, value in found.items() if math.isfinite(value)}


def disturbed(weight: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """With Gaussian noise whose deviation is that share of the tensor's root mean square."""
    noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
    return weight + share * weight.square().mean().sqrt() * noise


# --- the ends of the spectrum: the paper's sections 3.3 and 3.4 -------------------------------


def spectrum(
    model: nn.Module, batches: Iterable[Batch], seed: int, products: int
) -> dict[str, Any]:
    """``eigenvalues`` and ``stability`` for a run's result; with no products, nothing.

    The same measure for every method: plain cross-entropy in eval mode. A search that ends before
    its values are found has bounds (``converged`` is false): the largest eigenvalue is at least,
    the smallest at most what it says. One that cannot be made says why.
    """
    from seht.measure import stability

    if not products:
        return {}
    size = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    kept = list(batches)
    try:
        with judging(model):
            found = stability(
                model,
                plain_loss,
                kept,
                largest=1,
                smallest=1,
                tol=TOLERANCE,
                max_products=max(2, min(products, MEMORY // (8 * size))),
                solver="lanczos",
                batch_dim=kept[0].y.dim() - 1,
                seed=seed,
            )
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        return {"stability": {"verdict": "undecided", "reason": one_line(error)}}
    ends = found.eigenvalues
    numbers = found.as_dict()
    return {
        "eigenvalues": {
            "largest": ends.largest[0],
            "smallest": ends.smallest[0],
            "largest_residual": ends.largest_residuals[0],
            "smallest_residual": ends.smallest_residuals[0],
            "converged": ends.converged,
            "products": ends.products,
            "samples": ends.samples,
        },
        "stability": {
            name: numbers[name]
            for name in ("verdict", "equilibrium", "distance", "gradient_norm", "largest_rate")
        },
    }
