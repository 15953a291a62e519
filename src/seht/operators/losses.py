r"""Losses. Those with kinks are written with operations whose decisions can be frozen one by one.

Each is the definition in PyTorch's documentation; the names are those of ``torch.nn.functional``.

Small losses are computed in float64. If a network is confident, the gradient of its loss in the
logits, :math:`p_y - 1`, is the small difference of two numbers near 1, and float32 keeps few digits
of it. A difference of gradients divides that error by the square of the step: on an MLP trained to
a loss of 1e-5 the gradient of the trace was off by a third at the step that the engine chose, and
by 2 % at the best one; with only the loss in float64 it is off by some tenths of a percent. For a
few logits that costs nothing; with many of them, as in a language model, the loss stays in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.arithmetic import elementwise
from seht.operators.axes import Axis, Call, Sum, Tag, bends, couples, first_of
from seht.operators.operator import Operator, by_name, named
from seht.operators.rules import Mode, composed, opened, refused, untaped


def _l1(input: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """|x - y|."""
    loss = (input - target).abs()
    return loss if weight is None else loss * weight


def _smooth_l1(input: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    """d^2 / 2 beta near 0, |d| - beta / 2 beyond beta."""
    d = input - target
    size = d.abs()
    return size if beta == 0 else torch.where(size < beta, d * d / (2 * beta), size - beta / 2)


def _huber(
    input: Tensor, target: Tensor, delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d^2 / 2 near 0, delta (|d| - delta / 2) beyond delta."""
    d = input - target
    size = d.abs()
    loss = torch.where(size < delta, d * d / 2, delta * (size - delta / 2))
    return loss if weight is None else loss * weight


def _hinge_embedding(input: Tensor, target: Tensor, margin: float = 1.0) -> Tensor:
    """X where the target is 1, max(0, margin - x) where it is -1."""
    # As PyTorch has it: a target that is neither counts as both.
    far = (margin - input).clamp(min=0)
    return torch.where(target == -1, 0.0, input) + torch.where(target == 1, 0.0, far)


def _margin_ranking(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0) -> Tensor:
    """max(0, -y (x1 - x2) + margin)."""
    return (-target * (input1 - input2) + margin).clamp(min=0)


def _multi_margin(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None
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
    return loss.squeeze(0) if input.dim() < 2 else loss


def _multilabel_margin(input: Tensor, target: Tensor) -> Tensor:
    """The sum over right classes y and wrong ones i of max(0, 1 - x_y + x_i) / C."""
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    listed = (labels >= 0).cumprod(1)  # the list of right classes ends before the first -1
    labels = labels.clamp(min=0)
    right = torch.zeros_like(labels).scatter_add(1, labels, listed) > 0
    pairs = (listed.unsqueeze(2) * ~right.unsqueeze(1)).to(rows.dtype)
    hinges = (1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    loss = (hinges * pairs).sum((1, 2)) / rows.shape[1]
    return loss.squeeze(0) if input.dim() == 1 else loss


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2,
    eps: float = 1e-6, swap: bool = False,
) -> Tensor:  # fmt: skip
    """max(0, d(a, p) - d(a, n) + margin)."""
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return (near - far + margin).clamp(min=0)


def _cosine_embedding(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0) -> Tensor:
    """1 - cos where the target is 1, max(0, cos - margin) where it is -1."""
    cos = F.cosine_similarity(input1, input2, dim=-1)
    far = torch.where(target == -1, (cos - margin).clamp(min=0), 0.0)
    return torch.where(target == 1, 1 - cos, far)


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6
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
    return loss + math.log(2 * math.pi) / 2 if full else loss


def _called_as(function: Any, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of each entry with the arguments of PyTorch's function, reduced as they say."""
    named_as = by_name(function)
    average_of_weights = function is F.l1_loss

    def call(*args: Any, **kwargs: Any) -> Tensor:
        given = named_as(args, kwargs)
        reduction = given.pop("reduction", "mean")
        average, reduce = given.pop("size_average", None), given.pop("reduce", None)
        if reduce is False:
            reduction = "none"
        elif average is not None or reduce is not None:  # the old words for it
            reduction = "sum" if average is False else "mean"
        each = loss(**given)
        if reduction != "mean":
            return each if reduction == "none" else each.sum()
        if average_of_weights and given.get("weight") is not None:
            return each.sum() / given["weight"].expand_as(each).sum()
        return each.mean()

    return call


_FUSED = refused("has kinks, which are frozen where it is called as torch.nn.functional's")


def _kinked(name: str, loss: Callable[..., Tensor], *, safe: bool = False) -> list[Operator]:
    """A loss by its definition; beneath torch.nn.functional its arguments are others."""
    function = getattr(F, name)
    own = _called_as(function, loss)
    return [
        Operator((function,), composed(own), safe=(lambda _: own) if safe else None),
        Operator(named(name, function), _FUSED),
    ]


# --- how they carry the examples: each has its own loss, or they are added up ---------------------


def _reduced(call: Call, tag: Tag | None) -> Tag | None:
    """Added up or not: seen in what came out, as there are old names for ``reduction``, too."""
    whole = call.out.dim() == 0 and isinstance(tag, Axis)
    return Sum(call.name) if whole else tag


def entries(call: Call) -> Tag | None:
    """A loss of each entry: squared error, binary cross-entropy and the like."""
    pair = [call.main()[0], call.argument(1, "target")]
    if call.beside(*pair):  # weights that the examples have made: a mean divides by their sum
        return couples(call)
    shape = torch.broadcast_shapes(*(t.shape for t in pair))
    whole = call.out.new_empty(()).expand(shape)  # what it is before it is reduced
    return _reduced(call, elementwise(call._replace(out=whole)))


def classes(call: Call) -> Tag | None:
    """A loss of each row of logits: the classes lie along dimension 1, or are all there is."""
    x, axis = call.main()
    target = call.argument(1, "target")
    others = call.beside(x)
    total = first_of(Sum, [axis, *others])
    if total is not None:
        return bends(call, total)
    column = 1 if x.dim() > 1 else 0
    found = axis
    if others:  # soft targets that the examples have made
        mine = call.tag(target)
        if call.beside(x, target) or (axis is not None and mine != axis):
            return couples(call)
        if not (isinstance(target, Tensor) and target.shape == x.shape):
            return couples(call)
        found = mine
    if not isinstance(found, Axis):
        return found
    if found.dim == column:
        return couples(call)
    return _reduced(call, found.at(found.dim - (found.dim > column)))


def chosen(call: Call) -> Tag | None:
    """nll_loss: picks an entry of each row, and is linear in it."""
    x, tag = call.main()
    if isinstance(tag, Sum) and not call.beside(x):
        return tag
    return classes(call)


# --- in float64 ----------------------------------------------------------------------------------

MOST = 1 << 16
"""The most logits for which float64 does not slow a step down noticeably."""


def _double(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if floating else value


def _small(logits: Tensor) -> bool:
    # Apple's GPUs have no float64.
    return logits.dtype == torch.float32 and logits.numel() <= MOST and logits.device.type != "mps"


def _run(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    logits = args[0] if args else kwargs.get("input")
    if not (isinstance(logits, Tensor) and _small(logits)):
        return func(*args, **kwargs)
    wide = {name: _double(value) for name, value in kwargs.items()}
    return func(*map(_double, args), **wide).to(logits.dtype)


DOUBLE = untaped(_run)


def _unchunked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # With options it computes its gradient beforehand, as numbers without a graph.
    return lambda *args, options=None, **kwargs: function(*args, **kwargs)


OPERATORS = (
    *_kinked("l1_loss", _l1),
    *_kinked("smooth_l1_loss", _smooth_l1),
    *_kinked("huber_loss", _huber),
    *_kinked("hinge_embedding_loss", _hinge_embedding),
    *_kinked("margin_ranking_loss", _margin_ranking),
    *_kinked("triplet_margin_loss", _triplet_margin),
    *_kinked("cosine_embedding_loss", _cosine_embedding),
    *_kinked("gaussian_nll_loss", _gaussian_nll),
    # the fused ones have no double backward
    *_kinked("multi_margin_loss", _multi_margin, safe=True),
    *_kinked("multilabel_margin_loss", _multilabel_margin, safe=True),
    Operator((F.triplet_margin_with_distance_loss,), opened(F.triplet_margin_with_distance_loss)),
    Operator((F.cross_entropy,), axes=classes, sharp=DOUBLE),
    Operator((F.binary_cross_entropy_with_logits,), axes=entries, sharp=DOUBLE),
    Operator((F.nll_loss,), axes=chosen),
    Operator((F.mse_loss, F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss), axes=entries),
    Operator("linear_cross_entropy", safe=_unchunked),  # of torch 2.13
)  # fmt: skip
