r"""The fast engine: symmetric differences of ordinary gradients, every decision frozen.

With :math:`w_\pm = w \pm e\sigma`,

.. math::

    t = \sigma^T H \sigma \approx \sigma \cdot (g(w_+) - g(w_-)) / 2e, \qquad
    \nabla t \approx (g(w_+) + g(w_-) - 2 g(w)) / e^2 ,

both with an error of order :math:`e^2`: three plain steps, and nothing but first derivatives, which
every operator has right. The centre pass records each decision and the perturbed passes replay it
(``replay.py``, ``rules.py``, ``kinks.py``); without that the difference of a ReLU network is another
object, whatever the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seht.engines.base import Directions, Estimate, Task, check_loss, report_unused, split
from seht.engines.buffers import BorrowedBuffers
from seht.engines.graph import Stored, leaves_of, mark, quiet
from seht.engines.replay import Recorder, Replayer, extra_run
from seht.engines.rules import Spoilt
from seht.engines.state import RandomState, Weights, uninterrupted

KAPPA = {torch.float64: 1e-4, torch.float32: 1e-2}


class Passes:
    """The centre pass of one task, and its perturbed passes."""

    def __init__(self, task: Task, *, compact: bool) -> None:
        self.task = task
        self.random = RandomState(task.weights.values())
        self.buffers = BorrowedBuffers(task.model)
        self.recorder = Recorder(self.random, compact=compact)
        self.start = self.random.read()
        since = mark()
        with self.buffers, self.recorder:
            self.output = task.closure()
        self.loss = check_loss(split(self.output)[0])
        self.end = self.random.read()
        self.leaves, self.older = leaves_of(self.loss, since)
        reached = {id(leaf) for leaf in self.leaves}
        self.used = {n: w for n, w in task.weights.items() if id(w) in reached}
        self.unused = report_unused(task, [n for n in task.weights if n not in self.used])
        self.weights = Weights(self.used)

    def centre_gradient(self, *, keep: bool) -> list[Tensor | None]:
        """The gradient at the centre."""
        return self._gradient(self.loss, keep=keep or self.older)

    def gradient(self, sigma: Directions, step: Tensor) -> list[Tensor | None]:
        """The gradient at w + step * sigma, taken while the weights are there."""
        replayer = Replayer(self.recorder)
        self.random.write(self.start)
        try:
            with self.weights.moved(sigma, step):
                with BorrowedBuffers(self.task.model), replayer, extra_run():
                    output = self.task.closure()
                replayer.finish(self.end)
                loss = check_loss(split(output)[0])
                return self._gradient(loss, keep=self.older)
        finally:
            self.random.write(self.end)

    def _gradient(self, loss: Tensor, *, keep: bool) -> list[Tensor | None]:
        with quiet(self.leaves):
            return list(
                torch.autograd.grad(loss, self.leaves, retain_graph=keep, allow_unused=True)
            )

    def along(self, sigma: Directions, gradient: list[Tensor | None]) -> Tensor:
        """Sigma . g over the drawn tensors."""
        total = self.loss.new_zeros((), dtype=torch.float64)
        by_id = {id(w): sigma[n] for n, w in self.used.items()}
        for leaf, g in zip(self.leaves, gradient, strict=True):
            if g is not None and id(leaf) in by_id:
                total += (g * by_id[id(leaf)]).sum().double()
        return total


class DifferenceEngine:
    """Right through any operator with an ordinary gradient; three plain steps per probe."""

    name = "difference"

    def __init__(self) -> None:
        self.compact = False

    def estimate(self, task: Task) -> Estimate:
        """Loss and trace; the perturbed passes are differentiated here, one graph at a time."""
        with torch.inference_mode(False), torch.enable_grad(), uninterrupted():
            before = RandomState(task.weights.values())
            start = before.read()
            try:
                return self._estimate(task)
            except Spoilt:
                # An in-place operation overwrote an output we count on: keep masks from now on.
                self.compact = True
                before.write(start)
                return self._estimate(task)

    def _estimate(self, task: Task) -> Estimate:
        passes = Passes(task, compact=self.compact)
        value = passes.loss.new_zeros((), dtype=torch.float64)
        pull = torch.zeros_like(value)
        outer: list[Tensor | None] | None = None
        probes = task.estimator.probes
        scale = task.estimator.scale / probes
        for sigma in task.probes() if passes.used else ():
            e = passes.weights.step(sigma, self.kappa(passes))
            plus = passes.gradient(sigma, e)
            value += passes.along(sigma, plus) * (scale / (2 * e))
            outer = _add(outer, plus, scale / e**2)
            del plus
            minus = passes.gradient(sigma, -e)
            value -= passes.along(sigma, minus) * (scale / (2 * e))
            outer = _add(outer, minus, scale / e**2)
            del minus
            pull -= 2 * scale / e**2
        loss, trace = passes.loss, value.to(passes.loss.dtype)
        if task.differentiable and outer is not None:
            inputs = [loss, *passes.leaves]
            trace = Stored.apply(trace, [1, *outer], [pull, *[1.0] * len(outer)], *inputs)
        if not task.differentiable:
            loss = loss.detach()
        return Estimate(
            loss, trace, passes.output, passes.unused, commit=passes.buffers.commit
        )

    def kappa(self, passes: Passes) -> float:
        """The step relative to the weights."""
        return KAPPA[next(iter(passes.used.values())).dtype]


def _add(
    total: list[Tensor | None] | None, part: list[Tensor | None], scale: Tensor
) -> list[Tensor | None]:
    """Total + scale * part; consumes part."""
    scaled = [None if g is None else g.mul_(scale) for g in part]
    if total is None:
        return scaled
    return [
        b if a is None else a if b is None else a.add_(b)
        for a, b in zip(total, scaled, strict=True)
    ]
