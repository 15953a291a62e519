"""Losses with kinks, written with operations whose decisions can be frozen one by one.

Each is the definition in PyTorch's documentation; the names are those of ``torch.nn.functional``.
So are distances between all rows, which losses are made of.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _weighted(loss: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    if weight is None:
        return _reduce(loss, reduction)
    total = loss * weight
    if reduction == "mean":
        return total.sum() / weight.expand_as(loss).sum()
    return _reduce(total, reduction)


def _legacy(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def l1(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """The mean of |x - y|."""
    return _weighted((input - target).abs(), _legacy(size_average, reduce, reduction), weight)


def smooth_l1(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """d^2 / 2 beta near 0, |d| - beta / 2 beyond beta."""
    reduction = _legacy(size_average, reduce, reduction)
    if beta == 0:
        return l1(input, target, reduction=reduction)
    d = input - target
    size = d.abs()
    return _reduce(torch.where(size < beta, d * d / (2 * beta), size - beta / 2), reduction)


def huber(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """d^2 / 2 near 0, delta (|d| - delta / 2) beyond delta."""
    d = input - target
    size = d.abs()
    loss = torch.where(size < delta, d * d / 2, delta * (size - delta / 2))
    return _reduce(loss if weight is None else loss * weight, reduction)


def hinge_embedding(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """X where the target is 1, max(0, margin - x) where it is -1."""
    # As PyTorch has it: a target that is neither counts as both.
    far = (margin - input).clamp(min=0)
    loss = torch.where(target == -1, 0.0, input) + torch.where(target == 1, 0.0, far)
    return _reduce(loss, _legacy(size_average, reduce, reduction))


def margin_ranking(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, -y (x1 - x2) + margin)."""
    loss = (-target * (input1 - input2) + margin).clamp(min=0)
    return _reduce(loss, _legacy(size_average, reduce, reduction))


def multi_margin(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The mean over wrong classes of max(0, margin - x_y + x_i)^p."""
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    labels = target.reshape(-1, 1)
    # Flat at the margin itself, as PyTorch has it, where a clamp would have a slope.
    loss = (margin - rows.gather(1, labels) + rows).relu() ** p
    if weight is not None:
        loss = loss * weight[labels]
    wrong = torch.ones_like(loss).scatter(1, labels, 0.0)
    loss = (loss * wrong).sum(1) / rows.shape[1]
    if input.dim() < 2:
        loss = loss.squeeze(0)
    return _reduce(loss, _legacy(size_average, reduce, reduction))


def multilabel_margin(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The sum over right classes y and wrong ones i of max(0, 1 - x_y + x_i) / C."""
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    named = (labels >= 0).cumprod(1)  # the list of right classes ends before the first -1
    labels = labels.clamp(min=0)
    right = torch.zeros_like(labels).scatter_add(1, labels, named) > 0
    pairs = (named.unsqueeze(2) * ~right.unsqueeze(1)).to(rows.dtype)
    hinges = (1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    loss = (hinges * pairs).sum((1, 2)) / rows.shape[1]
    if input.dim() == 1:
        loss = loss.squeeze(0)
    return _reduce(loss, _legacy(size_average, reduce, reduction))


def triplet_margin(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, d(a, p) - d(a, n) + margin)."""
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    loss = (near - far + margin).clamp(min=0)
    return _reduce(loss, _legacy(size_average, reduce, reduction))


def cosine_embedding(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """1 - cos where the target is 1, max(0, cos - margin) where it is -1."""
    cos = F.cosine_similarity(input1, input2, dim=-1)
    far = torch.where(target == -1, (cos - margin).clamp(min=0), 0.0)
    loss = torch.where(target == 1, 1 - cos, far)
    return _reduce(loss, _legacy(size_average, reduce, reduction))


def gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """(log v + (x - y)^2 / v) / 2 with v = max(var, eps)."""
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if (variance < 0).any():
        raise ValueError("var has negative entry/entries")
    if variance.dim() == input.dim() - 1:
        variance = variance.unsqueeze(-1)
    # PyTorch clamps behind autograd's back: the derivative is that of var on both sides of eps.
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = (variance.log() + (input - target) ** 2 / variance) / 2
    return _reduce(loss + math.log(2 * math.pi) / 2 if full else loss, reduction)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The p-norm of each row of x1 less each of x2."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The same between the rows of one matrix, each pair once."""
    a, b = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[a] - input[b], p, dim=-1)
