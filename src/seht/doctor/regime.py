"""The regime: does the model memorise its data, or has it not even fitted them?

In trials the penalty helped most where a model memorised, and did harm where it underfitted. The
loss with every example's predictions swapped for another's shows whether anything was learnt at
all: before training the swap makes no difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from seht.curvature.head import find_module
from seht.doctor.patient import Patient
from seht.measure.keep import evaluating
from seht.measure.results import PlainResult
from seht.tensors.trees import mapped

Kind = Literal["memorising", "between", "underfitting", "untrained", "unknown"]
_MEMORISED, _NONE = 0.5, 0.1
"""The gap between held-out and training loss, as a fraction of the held-out loss: above the first
number the model memorises, below the second it underfits."""
_LEARNT = 0.02
"""If swapped predictions raise the loss by less than this fraction, nothing was learnt yet."""
_DIGITS = 1e-6
"""Two means that differ by less than this fraction are of the same examples, in whatever order."""


@dataclass(frozen=True)
class Regime(PlainResult):
    """Mean losses in evaluation mode, with standard errors over batches (nan for one batch)."""

    kind: Kind
    why: str
    train: float
    train_stderr: float
    swapped: float | None
    """The loss on training data with predictions swapped between examples."""
    held_out: float | None = None
    held_out_stderr: float | None = None


def find_regime(patient: Patient, boundary: str | None, end: float) -> Regime:
    """Compare the losses on training data, with swapped predictions, and on held-out data."""
    with evaluating(patient.model):
        train = patient.losses(patient.batches, end)
        with _swapped(find_module(patient.model, boundary)) as outputs:
            swapped = [patient.objective.loss(batch) for batch in patient.batches[: len(train)]]
        held_out = patient.losses(patient.held_out, end) if patient.held_out else []
    known = bool(outputs) and swapped != train and all(map(math.isfinite, swapped))
    kind, why = judge(train, swapped if known else [], held_out)
    return Regime(
        kind,
        why,
        *_mean(train),
        statistics.fmean(swapped) if known else None,
        *(_mean(held_out) if held_out else (None, None)),
    )


def judge(
    train: Sequence[float], swapped: Sequence[float], held_out: Sequence[float]
) -> tuple[Kind, str]:
    """The regime, and why, from the losses of batches."""
    own, error = _mean(train)
    if swapped:
        rise, noise = _mean([b - a for a, b in zip(train, swapped, strict=True)])
        if rise <= max(_LEARNT * abs(own), 0.0 if math.isnan(noise) else 2 * noise):
            return "untrained", (
                "not trained yet (predictions of other examples fit as well), so that the regime "
                "is not known; look again after some training"
            )
    if not held_out:
        return "unknown", (
            "not known without held-out data: give held_out=, batches that are not trained on"
        )
    other, noise = _mean(held_out)
    gap, size = other - own, max(abs(own), abs(other))
    error = math.hypot(error, noise)
    part = gap / size if size > 0 else 0.0
    if math.isclose(other, own, rel_tol=_DIGITS):
        return "unknown", (
            "not known: the held-out loss is the training loss to the last digit, as if both were "
            "of the same examples; give held-out data that are not trained on"
        )
    if part < _NONE:
        return "underfitting", (
            "the held-out loss is hardly above the training loss: nothing is memorised, and a "
            "penalty would take from the fit"
        )
    if part > _MEMORISED and not gap <= 2 * error:
        return "memorising", (
            f"{100 * part:.0f} % of the held-out loss is not there on training data: the model "
            "memorises, and that is where the penalty gained in trials, most with wrong labels or "
            "few data"
        )
    return "between", (
        f"{100 * part:.0f} % of the held-out loss is not there on training data: some of it is "
        "memorised; a gain is possible and not to be expected"
    )


def _mean(values: Sequence[float]) -> tuple[float, float]:
    error = math.nan
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), error


@contextmanager
def _swapped(module: nn.Module) -> Iterator[list[torch.Size]]:
    """Gives every example the outputs of another one, half a batch away; yields their shapes."""
    found: list[torch.Size] = []

    def swap(tensor: Tensor) -> Tensor:
        axis = next((k for k, length in enumerate(tensor.shape[:2]) if length > 1), None)
        if axis is None or not tensor.is_floating_point():
            return tensor
        found.append(tensor.shape)
        return tensor.roll(tensor.shape[axis] // 2, axis)

    handle = module.register_forward_hook(lambda module, inputs, out: mapped(out, swap))
    try:
        yield found
    finally:
        handle.remove()
