"""The trace of the Hessian of a whole data set's mean loss, with an honest error.

The data is read in micro-batches. In each, independent replicates are drawn, whose spread gives the
standard error *over probes given the data* (:mod:`seht.measure.stats`); the spread between examples
is no error of this quantity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from seht.engines import Replicates
from seht.errors import check_count, check_options, check_positive, unknown
from seht.measure.data import MICRO_BATCH
from seht.measure.objective import CurvatureOptions, Measurement, measuring
from seht.measure.probing import Probing
from seht.measure.results import Layer, TraceResult
from seht.measure.stats import Pooled, Visit, pool, sampling_error
from seht.probes import mix
from seht.task import LossFn
from seht.tensors.trees import is_batch

METHODS = ("auto", "per-sample", "shared")
_LEAST_DOF = 8
"""With fewer degrees of freedom a small error may be luck, so reading does not stop."""
_MOST_PROBES = 1000


def trace(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    tol: float | None = None,
    probes: int | None = None,
    per_layer: bool = False,
    method: str = "auto",
    **options: Unpack[CurvatureOptions],
) -> TraceResult:
    """Measure tr(H) of the mean loss over ``data``, with its standard error.

    tr(H) = 1/N Σ tr(Hₙ) over N examples, each with random probes sₙ of its own if the loss allows
    it: the mean of sₙᵀ Hₙ sₙ (Hutchinson, Communications in Statistics 19, 1990).

    Example:
        ```python
        result = seht.measure.trace(model.eval(), loss_fn, loader, tol=0.1)
        print(result.estimate, result.stderr, result.interval())
        ```

    Cost: about three forward passes over the data for each replicate, and one more; one and a half
    for each if the outputs are affine in every single weight tensor (linear layers, ReLU, pooling).

    The model is measured in the mode it is in; usually you want ``model.eval()`` first. Weights,
    buffers, gradients, modes and random states are afterwards what they were, also after an
    exception or an interrupt.

    Args:
        model: the module; its weights are float32 or float64.
        loss_fn: ``loss_fn(model, batch)`` returns the *mean* loss of the batch, or ``(loss, aux)``.
        data: a tensor, or a tuple, list, dictionary or dataclass of tensors (one batch); a data
            set; or any other iterable of batches, each weighted by its number of examples.
        tol: go on until the standard error is this fraction of the estimate.
        probes: independent replicates for each micro-batch, 2 by default; with 1 the error is nan.
        per_layer: also measure the trace of each tensor's own block of the Hessian.
        method: ``"per-sample"`` probes, ``"shared"`` ones (one direction for each micro-batch, with
            many times the variance), or ``"auto"``: per-sample if the model keeps examples apart.
        options: what all measurements take (``curvature`` and ``boundary`` only some of them):

            - ``curvature``: ``"hessian"``, or ``"ggn"`` for the Gauss-Newton part;
            - ``boundary``: for ``"ggn"``, the name of the module whose outputs are the network's
              outputs, if it is not the model itself;
            - ``seed``: of all random numbers, 0 by default; the same seed gives the same result;
            - ``progress``: ``True`` for a line on standard error, or a function that takes a
              :class:`seht.measure.Progress`;
            - ``params``: which tensors, as in :class:`seht.HessianTrace`;
            - ``micro_batch``: cut batches into parts of this many examples;
            - ``batch_dim``: the dimension of the tensors that holds the examples, 0 by default;
            - ``limit``: read at most this many examples; ``sampling_stderr`` then says how far
              the result may be from that of all data.
    """
    check_options(trace, options, CurvatureOptions.__annotations__)
    found = read(
        model, loss_fn, data, tol=tol, probes=probes, per_layer=per_layer, method=method, **options
    )
    return found.result()


def read(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    tol: float | None = None,
    probes: int | None = None,
    per_layer: bool = False,
    method: str = "auto",
    **options: Unpack[CurvatureOptions],
) -> Readings:
    """The readings that :func:`seht.measure.trace` is made from."""
    check_count("probes", probes, optional=True)
    check_positive("tol", tol, optional=True)
    if tol is not None and probes == 1:
        raise ValueError("tol needs an error, and one replicate has none; leave probes=1 out")
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    # One batch is cut to save memory, but only where its examples have nothing to do with each
    # other: it is read whole if that turns out otherwise.
    ours = is_batch(data) and options.get("micro_batch") is None and method != "shared"
    if ours:
        options["micro_batch"] = MICRO_BATCH
    with measuring("trace", model, loss_fn, data, again=tol is not None, **options) as m:
        probing = Probing(m.objective, method, options.get("batch_dim"), per_layer)
        readings = Readings(m, probing, ours)
        readings.read(2 if probes is None else probes)
        if tol is not None:
            readings.until(tol)
    return readings


class Readings:
    """The readings of one measurement; ``ours`` says that we cut the data into micro-batches."""

    def __init__(self, measurement: Measurement, probing: Probing, ours: bool) -> None:
        self.measurement, self.probing, self._ours = measurement, probing, ours
        self.objective = measurement.objective
        self.visits: list[Visit] = []
        self.readings = self.probes = self.samples = 0
        self.loss = 0.0
        self.first: Replicates | None = None
        self.step_error: float | None = None
        self.reached: bool | None = None
        """Whether the tolerance was reached; ``None`` without one."""

    def read(self, probes: int) -> None:
        """Read the data once, with so many replicates per micro-batch."""
        m = self.measurement
        samples, loss = 0, 0.0
        for place, (batch, count) in enumerate(m.read()):
            seed = mix(m.seed, 11, self.readings, place)
            part = self.probing(batch, count, probes, seed)
            self.objective.check_finite(part.loss, place)
            values = part.table(self.objective.chosen.tensors if self.probing.per_layer else ())
            if not values.isfinite().all():
                self.objective.check_finite(math.nan, place)
            if self.first is None:
                if self._cut_wrongly(part, count):
                    return self.read(probes)
                self.first = part
                self.step_error = self.probing.step_error(part, batch, seed)
            count = part.n or count
            self.visits.append(Visit(self.readings, count, values))
            samples, loss = samples + count, loss + count * part.loss
            if m.tell.on:
                pooled = pool(self.visits)
                error = math.sqrt(float(pooled.variance[0]))
                m.tell(place + 1, m.batches.total, float(pooled.mean[0]), error)
        self.readings, self.probes, self.samples = self.readings + 1, self.probes + probes, samples
        self.loss = loss / samples

    def until(self, tol: float) -> None:
        """Read on until the error is small enough, and known well enough to be believed."""
        while True:
            pooled = pool(self.visits)
            wanted = tol * abs(float(pooled.mean[0]))
            variance = float(pooled.variance[0])
            self.reached = math.sqrt(variance) <= wanted and pooled.dof >= _LEAST_DOF
            if self.reached or self.probes >= _MOST_PROBES:
                return
            share = variance / wanted**2 if wanted else math.inf
            # What the variance asks for and a little more; not too much, as it may be a bad guess.
            more = math.ceil(min(self.probes * (1.1 * share - 1), 2.0 * self.probes))
            self.read(max(2, min(more, _MOST_PROBES - self.probes)))

    def _cut_wrongly(self, part: Replicates, count: int) -> bool:
        """Whether a batch that we cut has coupled examples, or has them along another axis."""
        if not self._ours or (part.n in (None, count) and not self.probing.shared):
            return False
        self.measurement.uncut()
        self._ours = False
        return True

    def result(self) -> TraceResult:
        """Everything in one record."""
        pooled = pool(self.visits)
        assert self.first is not None
        notes = []
        if self.probing.reason is not None:
            notes.append(f"examples share their probes: {self.probing.reason}")
        elif self.first.shared and not self.probing.shared:
            notes.append(
                f"one direction for all examples in {', '.join(self.first.shared)}: there is no "
                "per-sample form of how they are used"
            )
        if self.first.affine:
            notes.append(
                "the outputs are affine in each weight alone, so that tr(H) = tr(G), which is "
                "cheaper to measure"
            )
        if self.first.unused:
            notes.append(f"the loss does not use {', '.join(self.first.unused)}: counted as 0")
        if self.reached is False:
            notes.append(
                f"the tolerance was not reached with {self.probes} replicates: the trace may be "
                "near 0, where no relative error is small"
            )
        error = self.step_error
        if error is not None and error > 0.1:
            notes.append(
                f"two steps of the difference disagree by some {error:.0%}: rounding, or a kink "
                "that is not frozen; measure in float64, and run seht.check on the model"
            )
        sampling = sampling_error(self.visits) if self.measurement.batches.partial else None
        return TraceResult(
            estimate=float(pooled.mean[0]),
            stderr=math.sqrt(float(pooled.variance[0])),
            dof=pooled.dof,
            samples=self.samples,
            layers=self._layers(pooled) if self.probing.per_layer else None,
            weight_norm=self.objective.weight_norm,
            seconds=self.measurement.seconds,
            curvature=self.objective.curvature,
            method="shared" if self.probing.shared else "per-sample",
            probes=self.probes,
            loss=self.loss,
            partial=self.measurement.batches.partial,
            sampling_stderr=sampling,
            step_error=error,
            reached=self.reached,
            notes=tuple(notes),
        )

    def weighted(self, factors: Sequence[float]) -> tuple[float, float]:
        """The sum of the layers' traces, each times a factor, and its standard error.

        Replicate by replicate: the layers share their probes, so that their errors do not add up.
        """
        shares = torch.tensor(factors, dtype=torch.float64)
        sums = [replace(v, values=(v.values[:, 1:] @ shares)[:, None]) for v in self.visits]
        pooled = pool(sums)
        return float(pooled.mean[0]), math.sqrt(float(pooled.variance[0]))

    def _layers(self, pooled: Pooled) -> dict[str, Layer]:
        return {
            name: Layer(
                float(pooled.mean[1 + i]),
                math.sqrt(float(pooled.variance[1 + i])),
                tensor.numel(),
                float(tensor.detach().double().norm()),
                float(pooled.dofs[1 + i]),
            )
            for i, (name, tensor) in enumerate(self.objective.chosen.tensors.items())
        }
