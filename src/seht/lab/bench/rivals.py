"""The rivals of a Hessian-trace penalty: SAM, and a Fisher trace from one sampled label each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht import probes
from seht.lab.bench.cases import Problem
from seht.lab.bench.runners import Runner
from seht.lab.methods.fisher import fisher_trace
from seht.operators.safe_forms import safe_ops
from seht.replay.weights import Weights, norm


class SamStep(Runner):
    """SAM's two passes (arXiv 2010.01412): the gradient at the worst point nearby."""

    rho = 0.05

    def run(self) -> None:
        """Climb, differentiate there, come back."""
        self.problem.closure().backward()
        every = self.problem.model.named_parameters()
        weights: dict[str, Tensor] = {name: p for name, p in every if p.grad is not None}
        climb = {name: p.grad for name, p in weights.items() if p.grad is not None}
        self.problem.model.zero_grad()
        with Weights(weights).moved(climb, self.rho / (norm(climb.values()) + 1e-12)):
            self.problem.closure().backward()


class FisherStep(Runner):
    r"""One-sample Fisher trace :math:`B \|\nabla CE(z, y)\|^2`, y drawn from the predictions.

    In expectation over y that is tr(G). Its gradient, by ``create_graph``, is not the gradient of
    tr(G): the draw depends on the weights too, and that part is missing.
    """

    def __init__(self, problem: Problem, weight: float = 1e-6) -> None:
        super().__init__(problem, weight)
        self._draw = 0
        self._context: Callable[[], Any] = nullcontext

    def prepare(self, draw: int) -> None:
        """Which labels are drawn."""
        self._draw = draw

    def run(self) -> None:
        """One pass with a graph of its gradient; fused attention has no such graph."""
        try:
            self._run()
        except RuntimeError as error:
            if self._context is safe_ops or "not implemented" not in str(error):
                raise
            self._context = safe_ops
            self.problem.model.zero_grad()
            self._run()

    def _run(self) -> None:
        with self._context():
            z = self.problem.logits(self.problem.x)
            loss = F.cross_entropy(z, self.problem.y.flatten())
            weights = list(probes.choose(self.problem.model).tensors.values())
            trace = fisher_trace(z, weights, self._labels(z.detach()))
        (loss + self.weight * trace).backward()

    def _labels(self, z: Tensor) -> Tensor:
        # By inverting the distribution function, so that float64 draws what float32 draws.
        ladder = z.softmax(1).cumsum(1)
        generator = torch.Generator().manual_seed(self._draw)
        u = torch.rand(len(z), 1, generator=generator).to(z.dtype)
        return torch.searchsorted(ladder, u).squeeze(1).clamp(max=z.shape[1] - 1)
