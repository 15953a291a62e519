"""A model's loss over data as a function of its weights, and the checks of what users give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from seht import probes
from seht.distributed import ranks_of
from seht.engines import Products
from seht.errors import NonFiniteError, one_line
from seht.functional import check_curvature
from seht.measure.data import Batches, cut
from seht.measure.keep import untouched
from seht.measure.progress import Report, Reporter
from seht.replay.closures import check_arguments
from seht.replay.state import BorrowedBuffers, Weights, norm
from seht.task import LossFn, check_loss, split
from seht.tensors.random_state import own_randomness
from seht.tensors.undo import uninterrupted


class DataOptions(TypedDict, total=False):
    """Options of every measurement, described in :func:`seht.measure.trace`."""

    seed: int
    progress: Report
    micro_batch: int | None
    batch_dim: int | None
    limit: int | None


class Options(DataOptions, total=False):
    """Options of measurements that choose among the weights."""

    params: probes.ParamSpec


class CurvatureOptions(Options, total=False):
    """Options of measurements that take the Hessian or its Gauss-Newton part."""

    curvature: str
    boundary: str | None


@dataclass(frozen=True)
class Objective:
    """A model and its loss, checked; ``chosen`` are the weights in which derivatives are taken."""

    model: nn.Module
    loss_fn: LossFn
    chosen: probes.Chosen
    curvature: str = "hessian"
    boundary: str | None = None
    params: probes.ParamSpec = None
    _inner: list[bool] = field(default_factory=list)
    """Not empty once the loss function was seen to take gradients itself."""

    @property
    def weights(self) -> list[Tensor]:
        """The chosen tensors."""
        return list(self.chosen.tensors.values())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.weights[0].device

    @property
    def weight_norm(self) -> float:
        """The common norm of the chosen weights."""
        return float(norm(self.weights))

    def closure(self, batch: Any) -> Callable[[], Any]:
        """Computes the loss of a batch."""
        return lambda: self.loss_fn(self.model, batch)

    def loss(self, batch: Any) -> float:
        """The loss of a batch, without a graph; no buffer moves."""
        found = self.evaluated(lambda: self.called(batch, TypeError, AttributeError, KeyError))
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

    def called(self, batch: Any, *mistakes: type[Exception]) -> Any:
        """What loss_fn returns; after these ``mistakes`` the error says how it is called."""
        try:
            return self.loss_fn(self.model, batch)
        except mistakes as error:
            raise TypeError(
                f"loss_fn(model, batch) raised {type(error).__name__}: {one_line(error)}; it is "
                f"called with the model and one batch (here a {type(batch).__name__}) and returns "
                "the mean loss: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), "
                "for example"
            ) from error

    def first_look(self, batch: Any, count: int, axis: int) -> None:
        """Refuse a loss that is not finite, or a sum that grows with the batch."""
        self.check_finite(self.loss(batch), 0)
        self._refuse_sum(batch, count, axis)

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

    def _refuse_sum(self, batch: Any, count: int, axis: int) -> None:
        """Compare a batch with its two halves."""
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


class Measurement:
    """An objective over its data: the mean loss, here and at moved weights, and its derivatives.

    Every reading begins with the same random numbers: one function, dropout or not. Vectors are
    flat, in float64 and on the CPU; a shift is a part for each tensor that is moved.
    """

    def __init__(
        self, objective: Objective, batches: Batches, axis: int, reporter: Reporter, seed: int
    ) -> None:
        self.objective, self.batches, self._axis = objective, batches, axis
        self.tell, self.seed = reporter, seed
        self._seen = False
        self.tensors = objective.chosen.tensors
        self.size = sum(tensor.numel() for tensor in self.tensors.values())
        """How many weights."""
        self.samples = 0
        """The number of examples in the last reading."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.tell.seconds

    def read(self) -> Iterator[tuple[Any, int]]:
        """Every micro-batch and the number of its examples; the very first is checked."""
        samples = 0
        for batch, count in self.batches:
            if not self._seen:
                with own_randomness():
                    self.objective.first_look(batch, count, self._axis)
                self._seen = True
            samples += count
            yield batch, count
        if not samples:
            raise ValueError("data holds no example, so there is nothing to measure on")
        self.samples = samples

    def uncut(self) -> None:
        """From now on batches are read whole."""
        self.batches = self.batches.whole()

    def loss(self) -> float:
        """Not necessarily finite."""
        return float(self._mean(lambda batch: self.objective.loss(batch)))

    def loss_at(self, shift: Mapping[str, Tensor]) -> float:
        """The loss at w + shift."""
        with self.moved(shift):
            return self.loss()

    @contextmanager
    def moved(self, shift: Mapping[str, Tensor]) -> Iterator[None]:
        """The weights are w + shift while the block runs, and come back bit for bit."""
        weights = Weights({name: self.tensors[name] for name in shift})
        with uninterrupted(), weights.moved(dict(shift), 1.0):
            yield

    def gradient(self) -> Tensor:
        """The gradient of the mean loss."""
        products = self.products()
        return self._mean(lambda batch: flat(products.gradient(self.objective.closure(batch))))

    def products(self) -> Products:
        """Computes products with one batch's Hessian or Gauss-Newton matrix."""
        objective = self.objective
        return Products(objective.model, objective.chosen, objective.curvature, objective.boundary)

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as a shift, in each weight's dtype and place."""
        pieces = vector.split([tensor.numel() for tensor in self.tensors.values()])
        return {
            name: piece.view(w.shape).to(device=w.device, dtype=w.dtype)
            for piece, (name, w) in zip(pieces, self.tensors.items(), strict=True)
        }

    def _mean(self, of: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        total = sum(count * of(batch) for batch, count in self.read())
        return total / self.samples


class HessianProduct:
    """The symmetric operator v -> Hv over all micro-batches, on flat vectors."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement, self._products = measurement, measurement.products()
        self.size = measurement.size
        self.count = 0
        """Products so far."""

    @property
    def differences(self) -> bool:
        """Whether they are made by differences: an operator has no second derivative."""
        return self._products.differences

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv."""
        m = self._measurement
        parts = list(m.parts(vector).values())
        self.count += 1
        return m._mean(lambda batch: flat(self._products(m.objective.closure(batch), parts)))


def flat(parts: Sequence[Tensor]) -> Tensor:
    """One vector in float64 on the CPU."""
    return torch.cat([part.detach().double().flatten().cpu() for part in parts])


@contextmanager
def measuring(
    what: str,
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
    progress: Report = None,
    again: bool = True,
) -> Iterator[Measurement]:
    """A checked measurement, for as long as the block runs; the model is left as it was.

    Data that can be read only once is kept if it is to be read ``again``.
    """
    seed = probes.check_seed(seed)
    reporter = Reporter(progress, what)
    check_arguments(model, loss_fn, "loss_fn")
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
    objective = Objective(model, loss_fn, chosen, curvature, boundary, params)
    axis = 0 if batch_dim is None else batch_dim
    batches = Batches(
        data, size=micro_batch, axis=axis, limit=limit, device=objective.device, again=again
    )
    try:
        with untouched(model, seed):
            yield Measurement(objective, batches, axis, reporter, seed)
    finally:
        reporter.close()
