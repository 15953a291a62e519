"""Noise stability optimisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seht import probes as draw
from seht.lab.methods.base import Closure, Method, Run, at_least, not_negative
from seht.lab.methods.trace import PenalisedLoss
from seht.replay.state import BorrowedBuffers, Weights
from seht.tensors.gradients import Gradient, add, handed_out, times
from seht.tensors.random_state import RandomState


class Nso(Method):
    r"""The loss averaged over weight noise.

    :math:`\frac12 (L(w + \sigma u) + L(w - \sigma u))`.

    Zhang, Li and Ju, arXiv 2306.08553: u Gaussian on every parameter. On a smooth network it tends
    to :math:`L + \frac12 \sigma^2 \mathrm{tr}(H)`; the step crosses the kinks of a ReLU network,
    where it is another penalty. The loss that is logged is that at :math:`w + \sigma u`. All passes
    have one dropout mask; buffers move in the first.

    Args:
        sigma: the deviation of the noise.
        probes: pairs of passes in a step.
    """

    name = "nso"

    def __init__(self, *, sigma: float = 0.01, probes: int = 1) -> None:
        self.sigma, self.probes = not_negative("sigma", sigma), at_least("probes", probes, 1)
        self.calls = 0
        self.last: Tensor | None = None

    def setup(self, run: Run) -> None:
        self.model, self.run_seed, self.passes_of_a_step = run.model, run.seed, run.passes
        self.tensors = draw.choose(run.model, "*").tensors

    def objective(self, closure: Closure) -> Closure:
        return PenalisedLoss(lambda: self.mean(closure), closure) if self.sigma > 0 else closure

    @property
    def seed(self) -> int:
        """The seed of the noise in the next call."""
        return draw.call_seed(self.run_seed, *divmod(self.calls, self.passes_of_a_step))

    def mean(self, closure: Closure) -> tuple[Tensor, Any]:
        """The objective, its gradient computed, and aux of the first pass.

        It keeps sigma u . (g(w + sigma u) - g(w - sigma u)) / 4, averaged over probes.
        """
        leaves = list(self.tensors.values())
        random, weights = RandomState(leaves), Weights(self.tensors)
        start, end = random.read(), None
        share = 1 / (2 * self.probes)
        total: Gradient = []
        losses, slopes, aux, first = [], [], None, None
        for k in range(self.probes):
            noise = {
                name: draw.gaussian(w.shape, draw.entry_seed(self.seed, k, place), w.device)
                for place, (name, w) in enumerate(self.tensors.items())
            }
            for side in (self.sigma, -self.sigma):
                if first is not None:
                    random.begin(start)
                with BorrowedBuffers(self.model) as buffers, weights.moved(noise, side):
                    loss, given = closure()
                    part: Gradient = list(torch.autograd.grad(loss, leaves, allow_unused=True))
                if first is None:
                    aux, first, end = given, buffers, random.end()
                pairs = zip(part, noise.values(), strict=True)
                along = [(g * u).sum().double() for g, u in pairs if g is not None]
                losses.append(loss.detach().double())
                slopes.append(torch.stack(along).sum() * side)
                total = add(total, times(part, share))
        assert first is not None and end is not None
        random.finish(end)
        first.commit()
        self.calls += 1
        self.last = torch.stack(slopes).sum() * share / 2
        mean = (torch.stack(losses).sum() * share).to(loss.dtype)
        return handed_out(mean, total, leaves), aux

    def log(self) -> dict[str, float]:
        return {"penalty": 0.0 if self.last is None else float(self.last)}

    def seek(self, step: int) -> None:
        self.calls = step * self.passes_of_a_step

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
