r"""The trace of the Hessian of a whole data set's mean loss, with an honest error.

:math:`\mathrm{tr}(H) = \frac1N \sum_n \mathrm{tr}(H_n)`: the mean over examples, each with a probe
of its own where the loss allows it. The data is read in micro-batches; in each, ``probes``
independent replicates are drawn, whose spread gives the standard error *over probes given the data*
(:mod:`seht.measure.stats`). The spread between examples is no error of this quantity.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from seht import probes as draw
from seht.errors import unknown
from seht.functional import check_seed
from seht.measure.data import MICRO_BATCH, Batches, check_count, is_batch
from seht.measure.keep import untouched
from seht.measure.probing import Part, Probing
from seht.measure.problem import LossFn, Problem, empty, make_problem
from seht.measure.progress import Report, Reporter
from seht.measure.results import Layer, TraceResult
from seht.measure.stats import Pooled, Visit, pool, sampling_error

METHODS = ("auto", "per-sample", "shared")
_LEAST_DOF = 8
"""Fewer degrees of freedom make a small error a matter of luck: no stopping on them."""
_MOST_PROBES = 1000


def trace(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    tol: float | None = None,
    probes: int | None = None,
    per_layer: bool = False,
    curvature: str = "hessian",
    seed: int = 0,
    progress: Report = None,
    params: draw.ParamSpec = None,
    boundary: str | None = None,
    method: str = "auto",
    micro_batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | None = None,
) -> TraceResult:
    r"""Measure :math:`\mathrm{tr}(H)` of the mean loss over ``data``.

    .. code-block:: python

        result = seht.measure.trace(
            model.eval(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), loader
        )
        print(result.estimate, result.stderr, result.interval())

    The model is measured in the mode it is in; ``model.eval()`` first is what one mostly wants.
    Weights, buffers, gradients, modes and random states are afterwards what they were, also after
    an exception or an interrupt.

    Args:
        model: the module; its weights are float32 or float64.
        loss_fn: ``loss_fn(model, batch)`` returns the *mean* loss of the batch, or ``(loss, aux)``.
        data: a tensor, or a tuple, list, dictionary or dataclass of tensors (one batch); a data
            set; or any other iterable of batches, each weighted by its number of examples.
        tol: go on until the standard error is this share of the estimate.
        probes: replicates per micro-batch, 2 by default; with 1 the error is nan.
        per_layer: also each tensor's share, the trace of its own block.
        curvature: ``"hessian"``, or ``"ggn"`` for the Gauss-Newton part.
        seed: the result is a function of it.
        progress: ``True`` for a line on standard error, or a function that takes a
            :class:`seht.measure.Progress`.
        params: which tensors, as in :class:`seht.HessianTrace`.
        boundary: for ``"ggn"``, the module whose outputs are the network's, if not the model's.
        method: ``"per-sample"`` probes, ``"shared"`` ones (one direction per micro-batch, many
            times the variance), or ``"auto"``: per-sample where the examples are not coupled.
        micro_batch: cut batches into so many examples.
        batch_dim: the examples' axis, 0 by default.
        limit: read so many examples and no more; ``sampling_stderr`` then says how far they may be
            from the whole.
    """
    if probes is not None:
        check_count("probes", probes)
    check_seed(seed)
    if tol is not None:
        if not (isinstance(tol, (int, float)) and 0 < tol < math.inf):
            raise ValueError(f"tol must be a positive number, such as 0.02, not {tol!r}")
        if probes == 1:
            raise ValueError("tol needs an error, and one replicate has none; leave probes=1 out")
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    problem = make_problem(model, loss_fn, params, curvature, boundary)
    axis = 0 if batch_dim is None else batch_dim

    def cut(size: int | None) -> Batches:
        again = tol is not None
        return Batches(data, size=size, axis=axis, limit=limit, device=problem.device, again=again)

    # One batch is cut to save memory, but only where its examples have nothing to do with each
    # other: `whole` is what to read if that turns out otherwise.
    ours = is_batch(data) and micro_batch is None and method != "shared"
    reporter = Reporter(progress, "trace")
    run = _Run(
        problem,
        Probing(problem, method, batch_dim, per_layer),
        cut(MICRO_BATCH if ours else micro_batch),
        cut(None) if ours else None,
        axis,
        seed,
        reporter,
    )
    try:
        with untouched(model, seed):
            run.read(2 if probes is None else probes)
            reached = None if tol is None else run.until(tol)
    finally:
        reporter.close()
    return run.result(reached)


class _Run:
    """The readings of one measurement."""

    def __init__(
        self,
        problem: Problem,
        probing: Probing,
        batches: Batches,
        whole: Batches | None,
        axis: int,
        seed: int,
        reporter: Reporter,
    ) -> None:
        self.problem, self.probing, self.axis, self.seed = problem, probing, axis, seed
        self.batches, self.whole, self.reporter = batches, whole, reporter
        self.visits: list[Visit] = []
        self.readings = self.probes = self.samples = 0
        self.loss = 0.0
        self.first: Part | None = None
        self.step_error: float | None = None

    def read(self, probes: int) -> None:
        """Read the data once, with so many replicates per micro-batch."""
        total = self.batches.total
        samples, loss = 0, 0.0
        for place, (batch, count) in enumerate(self.batches):
            if not self.visits:
                self._first_look(batch, count)
            seed = draw.mix(self.seed, 11, self.readings, place)
            part = self.probing(batch, count, probes, seed)
            self._check(part, place)
            if self.first is None:
                if self._cut_wrongly(part, count):
                    return self.read(probes)
                self.first = part
                self.step_error = self.probing.step_error(part, batch, seed)
            count = part.examples or count
            self.visits.append(Visit(self.readings, count, part.values))
            samples, loss = samples + count, loss + count * part.loss
            if self.reporter.on:
                pooled = pool(self.visits)
                self.reporter(
                    place + 1, total, float(pooled.mean[0]), math.sqrt(float(pooled.variance[0]))
                )
        if not samples:
            raise empty()
        self.readings, self.probes, self.samples = self.readings + 1, self.probes + probes, samples
        self.loss = loss / samples

    def until(self, tol: float) -> bool:
        """Read on until the error is small enough, and known well enough to be believed."""
        while True:
            pooled = pool(self.visits)
            wanted = tol * abs(float(pooled.mean[0]))
            variance = float(pooled.variance[0])
            if math.sqrt(variance) <= wanted and pooled.dof >= _LEAST_DOF:
                return True
            if self.probes >= _MOST_PROBES:
                return False
            share = variance / wanted**2 if wanted else math.inf
            # What the variance asks for and a little more; not too much, as it may be a bad guess.
            more = math.ceil(min(self.probes * (1.1 * share - 1), 2.0 * self.probes))
            self.read(max(2, min(more, _MOST_PROBES - self.probes)))

    def _first_look(self, batch: Any, count: int) -> None:
        self.problem.check_finite(self.problem.loss(batch), 0)
        self.problem.refuse_sum(batch, count, self.axis)

    def _cut_wrongly(self, part: Part, count: int) -> bool:
        """Whether a batch that we cut has coupled examples, or has them along another axis."""
        if self.whole is None or (part.examples in (None, count) and not self.probing.shared):
            return False
        self.batches, self.whole = self.whole, None
        return True

    def _check(self, part: Part, place: int) -> None:
        self.problem.check_finite(part.loss, place)
        if not part.values.isfinite().all():
            self.problem.check_finite(math.nan, place)

    def result(self, reached: bool | None) -> TraceResult:
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
        if reached is False:
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
        sampling = sampling_error(self.visits) if self.batches.partial else None
        return TraceResult(
            estimate=float(pooled.mean[0]),
            stderr=math.sqrt(float(pooled.variance[0])),
            dof=pooled.dof,
            samples=self.samples,
            layers=self._layers(pooled) if self.probing.per_layer else None,
            weight_norm=self.problem.weight_norm,
            seconds=self.reporter.seconds,
            curvature=self.problem.curvature,
            method="shared" if self.probing.shared else "per-sample",
            probes=self.probes,
            loss=self.loss,
            partial=self.batches.partial,
            sampling_stderr=sampling,
            step_error=error,
            reached=reached,
            notes=tuple(notes),
        )

    def _layers(self, pooled: Pooled) -> dict[str, Layer]:
        named: list[tuple[str, Tensor]] = list(self.problem.chosen.tensors.items())
        return {
            name: Layer(
                float(pooled.mean[1 + i]),
                math.sqrt(float(pooled.variance[1 + i])),
                tensor.numel(),
                float(tensor.detach().double().norm()),
            )
            for i, (name, tensor) in enumerate(named)
        }
