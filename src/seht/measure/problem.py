"""What is measured: a model, its loss and its data; the checks that every measurement makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seht import probes
from seht.distributed import ranks_of
from seht.errors import NonFiniteError
from seht.functional import check_curvature
from seht.measure.data import MICRO_BATCH, Batches, cut
from seht.measure.keep import untouched
from seht.replay.buffers import BorrowedBuffers
from seht.replay.weights import norm
from seht.task import check_loss, split

LossFn = Callable[[nn.Module, Any], Any]
"""``loss_fn(model, batch)``: the mean loss of a batch, a scalar or ``(scalar, aux)``."""


@dataclass(frozen=True)
class Problem:
    """A checked problem; ``chosen`` are the weights in which derivatives are taken."""

    model: nn.Module
    loss_fn: LossFn
    chosen: probes.Chosen
    curvature: str = "hessian"
    boundary: str | None = None
    seed: int = 0
    params: probes.ParamSpec = None
    _inner: list[bool] = field(default_factory=list)
    """Not empty once the loss is known to take gradients itself."""

    @property
    def weights(self) -> list[Tensor]:
        """The chosen tensors."""
        return list(self.chosen.tensors.values())

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.weights[0].device

    @property
    def weight_norm(self) -> float:
        """The common norm of the chosen weights."""
        return float(norm(self.weights))

    def steady(self) -> None:
        """Begin with the same random numbers each time: one function, dropout or not."""
        torch.manual_seed(self.seed)

    def closure(self, batch: Any) -> Callable[[], Any]:
        """Computes the loss of a batch."""
        return lambda: self.loss_fn(self.model, batch)

    def loss(self, batch: Any) -> float:
        """The loss of a batch, without a graph; no buffer moves."""
        found = self.evaluated(lambda: self._called(batch))
        return float(check_loss(split(found)[0], graph=False).detach())

    def evaluated(self, closure: Callable[[], Any]) -> Any:
        """What a closure returns: without a graph, unless it takes gradients itself (gradient
        penalties, physics-informed losses); no buffer moves.
        """
        if not self._inner:
            try:
                with torch.no_grad(), BorrowedBuffers(self.model):
                    return closure()
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
        with torch.enable_grad(), BorrowedBuffers(self.model):
            found = closure()
        self._inner.append(True)
        return found

    def _called(self, batch: Any) -> Any:
        """What loss_fn returns; a criterion in its place, say, is told what it is called with."""
        try:
            return self.loss_fn(self.model, batch)
        except (TypeError, AttributeError, KeyError) as error:
            raise TypeError(
                f"loss_fn(model, batch) raised {type(error).__name__}: {error}; it is called with "
                f"the model and one batch (here a {type(batch).__name__}) and returns the mean "
                "loss: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), for example"
            ) from error

    def mean_loss(self, batches: Batches) -> float:
        """The loss over all batches, not necessarily finite."""
        self.steady()
        total, count = 0.0, 0
        for batch, size in batches:
            total, count = total + size * self.loss(batch), count + size
        if not count:
            raise empty()
        return total / count

    def check_finite(self, loss: float, place: int) -> None:
        """Say what is not finite, and where."""
        if math.isfinite(loss):
            return
        for name, tensor in self.model.named_parameters():
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(
                    f"parameter {name!r} holds values that are not finite, so there is no "
                    "curvature to measure; load weights from before training broke"
                )
        raise NonFiniteError(
            f"the loss is {loss} on micro-batch {place} although every weight is finite; look at "
            "that batch, or at the loss function"
        )

    def refuse_sum(self, batch: Any, count: int, axis: int) -> None:
        """A loss that is a sum grows with the batch: compare a batch with its two halves."""
        if count < 2:
            return
        half = count // 2
        try:
            whole = self.loss(batch)
            first = self.loss(cut(batch, axis, count, 0, half))
            second = self.loss(cut(batch, axis, count, half, count))
        except Exception:  # a model that takes one size of batch only: nothing to be learnt here
            return
        mean = (half * first + (count - half) * second) / count
        if abs(whole - first - second) < 0.1 * abs(whole) and abs(whole - mean) > 0.3 * abs(whole):
            raise ValueError(
                f"loss_fn returns a sum over the examples ({whole:.4g} for a batch, {first:.4g} "
                f"and {second:.4g} for its halves); return their mean, reduction='mean'"
            )


def make_problem(
    model: Any, loss_fn: Any, params: probes.ParamSpec, curvature: str, boundary: str | None = None
) -> Problem:
    """Refuse what cannot be measured."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be callable, not {type(loss_fn).__name__}; "
            "pass a function loss_fn(model, batch) that returns the mean loss"
        )
    check_curvature(curvature)
    if params is not None and not callable(params) and not isinstance(params, str):
        params = tuple(params)  # a generator would be empty the next time
    ranks_of(model).need_whole("seht.measure")
    chosen = probes.choose(model, params)
    for name, tensor in chosen.tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"parameter {name!r} is {tensor.dtype}; second derivatives drown in its rounding. "
                "Measure a copy in float32: copy.deepcopy(model).float()"
            )
    return Problem(model, loss_fn, chosen, curvature, boundary, params=params)


@contextmanager
def measuring(
    model: Any,
    loss_fn: Any,
    data: Any,
    *,
    params: probes.ParamSpec = None,
    curvature: str = "hessian",
    boundary: str | None = None,
    micro_batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[tuple[Problem, Batches]]:
    """A checked problem and its data, for as long as the block runs; nothing changes."""
    problem = make_problem(model, loss_fn, params, curvature, boundary)
    axis = 0 if batch_dim is None else batch_dim
    batches = Batches(
        data, size=micro_batch, axis=axis, limit=limit, device=problem.device, again=True
    )
    with untouched(model, seed):
        for batch, count in batches:
            problem.check_finite(problem.loss(batch), 0)
            problem.refuse_sum(batch, count, axis)
            break
        else:
            raise empty()
        yield problem, batches


def empty() -> ValueError:
    """What to say of data without an example."""
    return ValueError("data holds no example, so there is nothing to measure on")


__all__ = ["MICRO_BATCH", "LossFn", "Problem", "empty", "make_problem", "measuring"]
