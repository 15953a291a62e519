"""Evaluates a trained model: losses, accuracies, perplexity, and how flat its minimum is."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seht
from seht.lab.methods.base import Batch
from seht.lab.methods.loss import outputs, plain_loss
from seht.measure.keep import evaluating

TRACE_EXAMPLES = 1000
LOSS_EXAMPLES, LOSS_TOKENS = 1000, 20_000
"""How much of the training data is used for the training loss at the end."""
TRACE_PROBES = 10
BINS = 15
"""Of confidence, for the calibration error."""


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], task: str) -> dict[str, float]:
    """Classes: ``loss``, ``top1`` and ``top5`` in per cent. Text: ``loss`` and ``perplexity``.

    Of both ``ece``, the calibration error in per cent. The perplexity
    is the exponential of the plain cross-entropy per token. Empty without batches.
    """
    totals: list[Tensor] = []
    tallies: list[Tensor] = []
    hidden, count = None, 0
    with evaluating(model):
        for batch in batches:
            logits, hidden = outputs(model, replace(batch, hidden=hidden))
            labels = batch.y.flatten()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            places = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
            totals.append(torch.stack([loss.double(), places[:, 0].sum(), places.sum()]))
            tallies.append(tally(logits, labels))
            count += len(labels)
    if not totals:
        return {}
    loss, first, five = (torch.stack(totals).sum(0) / count).tolist()
    ece = calibration_error(torch.stack(tallies).sum(0))
    if task == "text":
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "ece": ece}
    return {"loss": loss, "top1": 100 * first, "top5": 100 * five, "ece": ece}


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for derivatives, which cuDNN's recurrent layers do not have in it."""
    with evaluating(model), torch.backends.cudnn.flags(enabled=False):
        yield


def in_float(model: nn.Module) -> nn.Module:
    """The model, or a float32 copy of it: half precision is too coarse for second derivatives."""
    low = any(w.dtype in (torch.float16, torch.bfloat16) for w in model.parameters())
    return copy.deepcopy(model).float() if low else model


def flatness(model: nn.Module, batches: Iterable[Batch], seed: int) -> dict[str, Any]:
    r"""The trace of the mean training loss over these batches in eval mode, and what goes with it.

    The trace is linear in the loss, so that it is taken batch by batch, with the same probe on all:
    :math:`\sigma^T H \sigma = \sum_b \frac{n_b}{n} \sigma^T H_b \sigma`.
    """
    batches = list(batches)
    sizes = [batch.y.numel() for batch in batches]
    closures = [partial(plain_loss, model, batch) for batch in batches]
    with torch.no_grad(), judging(model):
        traces = [
            sum(
                size / sum(sizes) * seht.hessian_trace(model, closure, probes=1, seed=p).item()
                for size, closure in zip(sizes, closures, strict=True)
            )
            for p in range(seed * TRACE_PROBES, (seed + 1) * TRACE_PROBES)
        ]
        squares = [weight.double().square().sum().item() for weight in model.parameters()]
    trace = None
    if all(map(math.isfinite, traces)):  # else the means below are not finite, or raise
        trace = {
            "estimate": statistics.fmean(traces),
            "stderr": statistics.stdev(traces) / math.sqrt(len(traces)),
            "probes": len(traces),
        }
    return {"trace": trace, "weight_norm": math.sqrt(sum(squares))}


def tally(logits: Tensor, labels: Tensor) -> Tensor:
    """``(3, bins)``: predictions, their confidence and how many are right, by confidence."""
    confidence, choice = logits.double().softmax(1).max(1)
    right = (choice == labels).double()
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # (0, 1/15], (1/15, 2/15] ...
    made = torch.zeros(3, BINS, dtype=torch.float64, device=logits.device)
    return made.index_add_(1, place, torch.stack([torch.ones_like(right), confidence, right]))


def calibration_error(total: Tensor) -> float:
    r"""The expected calibration error in per cent, of the sum of tallies.

    .. math:: \sum_b \frac{n_b}{n} \, |\mathrm{accuracy}_b - \mathrm{confidence}_b|

    Naeini et al. 2015; with 15 bins as in Guo et al., arXiv 1706.04599.
    """
    count, confidence, right = total
    return 100 * ((right - confidence).abs().sum() / count.sum()).item()
