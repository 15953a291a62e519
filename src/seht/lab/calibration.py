"""Calibration: whether a model is right as often as it is sure."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15


def tally(logits: Tensor, labels: Tensor) -> Tensor:
    """``(3, bins)``: predictions, their confidence and how many are right, by confidence."""
    confidence, choice = logits.double().softmax(1).max(1)
    right = (choice == labels).double()
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # (0, 1/15], (1/15, 2/15] ...
    made = torch.zeros(3, BINS, dtype=torch.float64, device=logits.device)
    return made.index_add_(1, place, torch.stack([torch.ones_like(right), confidence, right]))


def error(total: Tensor) -> float:
    r"""The expected calibration error in per cent, of the sum of tallies.

    .. math:: \sum_b \frac{n_b}{n} \, |\mathrm{accuracy}_b - \mathrm{confidence}_b|

    Naeini et al. 2015; with 15 bins as in Guo et al., arXiv 1706.04599.
    """
    count, confidence, right = total
    return 100 * ((right - confidence).abs().sum() / count.sum()).item()
