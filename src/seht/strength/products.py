r"""Inner products of whole gradients, as the optimiser sees them.

One step of an optimiser moves the weights by :math:`-\eta P g` and so changes another loss, whose
gradient is u, by :math:`-\eta\, u^T P g`. For SGD P is the identity; Adam and its relatives divide
each entry by the root of its mean square. All lengths and angles here are those of P. A look at a
step gives the gradients that weights are computed from (:class:`Seen`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seht.distributed import Ranks
from seht.tensors.graph import quiet
from seht.tensors.memory import local
from seht.tensors.process import own_gradients

Vector = dict[str, Tensor]
"""A gradient, by the parameters' names; one that is missing is zero."""

_SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "variance")
"""Where Adam (AMSGrad first), RMSprop, Adadelta, Adagrad and Adafactor (of vectors) keep the mean
squares that they divide by."""
_FACTORS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))
"""Adafactor's mean squares of the rows and columns of a matrix, here and in Hugging Face."""


class Preconditioner:
    """What an optimiser multiplies each entry of a gradient by, up to a common factor."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._factors: dict[int, Any] = {}
        if optimizer is None:
            return
        given = [group.get("lr") for group in optimizer.param_groups]
        rates = [1.0 if rate is None else float(rate) for rate in given]  # None: Adafactor's own
        # In the first step of a warm-up all rates may be 0, and say nothing about each other.
        largest = max(rates, default=0.0) or 1.0
        rates = [rate / largest for rate in rates] if any(rates) else [1.0] * len(rates)
        for rate, group in zip(rates, optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                size = _divisor(optimizer.state.get(parameter, {}), group, parameter)
                self._factors[id(parameter)] = rate if size is None else rate / size

    def holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the optimiser moves any of them."""
        return any(id(parameter) in self._factors for parameter in parameters.values())

    def inner(self, a: Vector, b: Vector, parameters: Mapping[str, Tensor]) -> Tensor:
        """The inner products of their parts, in float64, one for each parameter; 0 for a parameter
        that the optimiser does not hold, and so does not move.
        """
        found = torch.zeros(len(parameters), dtype=torch.float64)
        other = 0.0 if self.holds(parameters) else 1.0
        for place, (name, parameter) in enumerate(parameters.items()):
            if name in a and name in b:
                both = a[name].double() * b[name].double()
                found[place] = (both * self._factors.get(id(parameter), other)).sum().cpu()
        return found


def _divisor(
    state: Mapping[str, Any], group: Mapping[str, Any], parameter: Tensor
) -> Tensor | None:
    """What the optimiser divides each entry of a gradient by, if it does."""
    eps = group.get("eps", 1e-8)
    if isinstance(eps, (tuple, list)):
        return _adafactor(state, group, local(parameter), float(eps[1]))
    largest = state.get("exp_inf")
    if isinstance(largest, Tensor):  # Adamax
        return local(largest).clamp(min=eps)
    squares = next((state[n] for n in _SQUARES if isinstance(state.get(n), Tensor)), None)
    if squares is None or squares.shape != parameter.shape:
        return None
    squares = local(squares)
    if "acc_delta" in state:  # Adadelta
        return (squares + eps).sqrt() / (local(state["acc_delta"]) + eps).sqrt()
    if "grad_avg" in state:  # RMSprop, centred
        squares = (squares - local(state["grad_avg"]).square()).clamp(min=0.0)
    return squares.sqrt() + eps


def _adafactor(
    state: Mapping[str, Any], group: Mapping[str, Any], parameter: Tensor, least: float
) -> Tensor | None:
    """It keeps a mean square for each row and each column of a matrix, and multiplies each step by
    the size of its tensor.
    """
    squares = next((state[n] for n in _SQUARES if isinstance(state.get(n), Tensor)), None)
    for rows, columns in _FACTORS:
        if isinstance(state.get(rows), Tensor):
            row, column = local(state[rows]), local(state[columns])
            if row.dim() < parameter.dim():
                row, column = row.unsqueeze(-1), column.unsqueeze(-2)
            squares = row * column / row.mean(-2, keepdim=True).clamp(min=1e-30)
    if squares is None or squares.shape != parameter.shape:
        return None
    scaled = group.get("scale_parameter", True)
    size = parameter.detach().square().mean().sqrt().clamp(min=least) if scaled else 1.0
    return local(squares).clamp(min=1e-30).sqrt() / size


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a step moves."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def vector(names: Sequence[str], gradients: Sequence[Tensor | None]) -> Vector:
    """Gradients (of sharded weights: this rank's part) under their names, without a graph."""
    found = zip(names, gradients, strict=True)
    return {name: local(g).to_dense() for name, g in found if g is not None}


def gradient(value: Tensor, weights: Mapping[str, Tensor]) -> Vector:
    """Past the user's hooks, and the graph stays for the user's own backward pass."""
    leaves = list(weights.values())
    if not value.requires_grad:
        return {}
    with own_gradients(), quiet(leaves):
        found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
    return vector(list(weights), found)


def mean(so_far: Vector, new: Vector, rate: float) -> Vector:
    """The running mean, as new tensors: a step that fails goes back to the old ones."""
    result = {name: (1 - rate) * part for name, part in so_far.items()}
    for name, part in new.items():
        if name in result and result[name].shape != part.shape:
            raise ValueError(
                f"the gradient of {name!r} has the shape {tuple(part.shape)}, and had "
                f"{tuple(result[name].shape)} while the share was measured: another model, or (of "
                "shards) another number of processes; make a new penalty for it, and load no state"
            )
        result[name] = result[name] + rate * part if name in result else rate * part
    return result


LOSS, TRACE, HELD_OUT = "loss", "trace", "held-out loss"
"""The functions whose gradients can be looked at."""


@dataclass(frozen=True)
class Seen:
    """What a look found: the gradients of the loss, of the trace, of the held-out loss."""

    parameters: Mapping[str, Tensor]
    loss: Vector
    trace: Vector
    held_out: Vector
    metric: Preconditioner
    ranks: Ranks
    losses: tuple[Tensor, ...] = ()
    """The losses on training and held-out data, if both were looked at."""
    calls: int = 1
    """How many calls make up the optimiser step."""
    hidden: bool = False
    """Whether rounding hides the trace's gradient, as far as the engine knows."""

    def means(self) -> list[float]:
        """The losses, the same on all ranks."""
        values = torch.stack([loss.detach().double().cpu() for loss in self.losses])
        return [float(x) for x in self.ranks.mean(values)]

    def products(self, *pairs: tuple[Vector, Vector]) -> list[float]:
        """Inner products, the same on all ranks."""
        found = [self.metric.inner(a, b, self.parameters) for a, b in pairs]
        leaves = list(self.parameters.values())
        return [float(x) for x in self.ranks.products(torch.stack(found), leaves)]

    def averaged(self, gradient: Vector) -> Vector:
        """The mean over ranks; a weight without a gradient on some rank counts as 0 there."""
        given = self.parameters.items()
        parts = [gradient[n] if n in gradient else torch.zeros_like(local(p)) for n, p in given]
        return dict(zip(self.parameters, self.ranks.averaged(parts), strict=True))
