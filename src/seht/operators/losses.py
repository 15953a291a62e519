"""Losses. Those with kinks are written with operations whose decisions can be frozen one by one.

Each is the definition in PyTorch's documentation; the names are those of ``torch.nn.functional``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.axes.criteria import chosen, classes, entries
from seht.operators.composed import composed, opened, refused
from seht.operators.float64_loss import DOUBLE
from seht.operators.operator import Operator, argument_names, named


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _l1(
    input: Tensor, target: Tensor, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """The mean of |x - y|."""
    loss = (input - target).abs()
    if weight is None:
        return _reduce(loss, reduction)
    total = loss * weight
    if reduction == "mean":
        return total.sum() / weight.expand_as(loss).sum()
    return _reduce(total, reduction)


def _smooth_l1(input: Tensor, target: Tensor, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """d^2 / 2 beta near 0, |d| - beta / 2 beyond beta."""
    if beta == 0:
        return _l1(input, target, reduction)
    d = input - target
    size = d.abs()
    return _reduce(torch.where(size < beta, d * d / (2 * beta), size - beta / 2), reduction)


def _huber(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """d^2 / 2 near 0, delta (|d| - delta / 2) beyond delta."""
    d = input - target
    size = d.abs()
    loss = torch.where(size < delta, d * d / 2, delta * (size - delta / 2))
    return _reduce(loss if weight is None else loss * weight, reduction)


def _hinge_embedding(
    input: Tensor, target: Tensor, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """X where the target is 1, max(0, margin - x) where it is -1."""
    # As PyTorch has it: a target that is neither counts as both.
    far = (margin - input).clamp(min=0)
    loss = torch.where(target == -1, 0.0, input) + torch.where(target == 1, 0.0, far)
    return _reduce(loss, reduction)


def _margin_ranking(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, reduction: str = "mean"
) -> Tensor:
    """max(0, -y (x1 - x2) + margin)."""
    return _reduce((-target * (input1 - input2) + margin).clamp(min=0), reduction)


def _multi_margin(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The mean over wrong classes of max(0, margin - x_y + x_i)^p."""
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    labels = target.reshape(-1, 1)
    # Flat at the margin itself, as PyTorch has it, where a clamp would have a slope.
    loss = (margin - rows.gather(1, labels) + rows).relu() ** p
    if weight is not None:
        loss = loss * weight[labels]
    wrong = torch.ones_like(loss).scatter(1, labels, 0.0)
    loss = (loss * wrong).sum(1) / rows.shape[1]
    return _reduce(loss.squeeze(0) if input.dim() < 2 else loss, reduction)


def _multilabel_margin(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The sum over right classes y and wrong ones i of max(0, 1 - x_y + x_i) / C."""
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    listed = (labels >= 0).cumprod(1)  # the list of right classes ends before the first -1
    labels = labels.clamp(min=0)
    right = torch.zeros_like(labels).scatter_add(1, labels, listed) > 0
    pairs = (listed.unsqueeze(2) * ~right.unsqueeze(1)).to(rows.dtype)
    hinges = (1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    loss = (hinges * pairs).sum((1, 2)) / rows.shape[1]
    return _reduce(loss.squeeze(0) if input.dim() == 1 else loss, reduction)


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2,
    eps: float = 1e-6, swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """max(0, d(a, p) - d(a, n) + margin)."""
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduce((near - far + margin).clamp(min=0), reduction)


def _cosine_embedding(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, reduction: str = "mean"
) -> Tensor:
    """1 - cos where the target is 1, max(0, cos - margin) where it is -1."""
    cos = F.cosine_similarity(input1, input2, dim=-1)
    far = torch.where(target == -1, (cos - margin).clamp(min=0), 0.0)
    return _reduce(torch.where(target == 1, 1 - cos, far), reduction)


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
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


def _called_as(function: Any, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss with the arguments of PyTorch's function, the old words for reduction included."""
    names = argument_names(function)

    def call(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        average, reduce = given.pop("size_average", None), given.pop("reduce", None)
        if reduce is False:
            given["reduction"] = "none"
        elif average is not None or reduce is not None:
            given["reduction"] = "sum" if average is False else "mean"
        return loss(**given)

    return call


_FUSED = refused("has kinks, which are frozen where it is called as torch.nn.functional's")


def _kinked(name: str, loss: Callable[..., Tensor], *, safe: bool = False) -> list[Operator]:
    """A loss by its definition; beneath torch.nn.functional its arguments are others."""
    function = getattr(F, name)
    own = _called_as(function, loss)
    return [
        Operator((function,), composed(own), safe=(lambda _: own) if safe else None),
        Operator(named(name, but=(function,)), _FUSED),
    ]


def _unchunked() -> Iterator[Operator]:
    # With options it computes its gradient beforehand, as numbers without a graph.
    def whole(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
        return F.linear_cross_entropy(*args, **kwargs)

    if hasattr(F, "linear_cross_entropy"):  # of torch 2.13
        yield Operator((F.linear_cross_entropy,), safe=lambda _: whole)


OPERATORS = (
    *_kinked("l1_loss", _l1),
    *_kinked("smooth_l1_loss", _smooth_l1),
    *_kinked("huber_loss", _huber),
    *_kinked("hinge_embedding_loss", _hinge_embedding),
    *_kinked("margin_ranking_loss", _margin_ranking),
    *_kinked("triplet_margin_loss", _triplet_margin),
    *_kinked("cosine_embedding_loss", _cosine_embedding),
    # the fused ones have no double backward
    *_kinked("multi_margin_loss", _multi_margin, safe=True),
    *_kinked("multilabel_margin_loss", _multilabel_margin, safe=True),
    Operator(named("gaussian_nll_loss"), composed(_gaussian_nll)),
    Operator((F.triplet_margin_with_distance_loss,), opened(F.triplet_margin_with_distance_loss)),
    Operator((F.cross_entropy,), axes=classes, sharp=DOUBLE),
    Operator((F.binary_cross_entropy_with_logits,), axes=entries, sharp=DOUBLE),
    Operator((F.nll_loss,), axes=chosen),
    Operator((F.mse_loss, F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss), axes=entries),
    *_unchunked(),
)
