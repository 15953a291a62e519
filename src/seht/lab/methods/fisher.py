"""The Fisher-trace penalty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seht import probes
from seht.lab.methods.base import Closure, Forward, Method, Run, not_negative


class Fisher(Method):
    r"""The trace of the Fisher matrix, from labels drawn from the model, added to the loss.

    Cross-entropy plus :math:`\lambda B \lVert \nabla_w \frac1B \sum_i -\log p_i(\hat y_i)
    \rVert^2`, with labels :math:`\hat y_i \sim p_i` drawn from the model.

    Jastrzebski et al., arXiv 2012.14193. The squared norm of the mini-batch gradient has the
    expectation tr(F) / B, so that with the factor B the weight compares with that of
    ``seht-h(curvature=ggn)``: for cross-entropy F is the Gauss-Newton matrix. Over the same tensors
    too, those of two or more dimensions.

    Args:
        weight: lambda.
        params: a glob pattern of tensors in place of these.
    """

    name = "fisher"

    def __init__(self, *, weight: float = 1e-3, params: str | None = None) -> None:
        self.weight, self.params = not_negative("weight", weight), params
        self.last: Tensor | None = None

    def setup(self, run: Run) -> None:
        self.tensors = list(probes.choose(run.model, self.params).tensors.values())
        self.text = run.recipe.task == "text"

    def term(self, forward: Forward) -> Tensor:
        """One more derivative through the closure's own forward pass."""
        trace = fisher_trace(forward.logits, self.tensors)
        self.last = trace.detach()
        return self.weight * trace

    def objective(self, closure: Closure) -> Closure:
        """Plain layers of text: cuDNN's and fused attention have no second derivative."""
        if not self.text:
            return closure

        def plain() -> object:
            with torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
                return closure()

        return plain

    def log(self) -> dict[str, float]:
        if self.last is None:
            return {}
        trace = float(self.last)
        return {"trace": trace, "penalty": self.weight * trace}


def fisher_trace(logits: Tensor, tensors: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
    """B times the squared norm of the gradient for drawn labels: an unbiased trace of F."""
    if labels is None:
        labels = torch.multinomial(logits.detach().softmax(1), 1).squeeze(1)
    loss = F.cross_entropy(logits, labels)
    gradients = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
    norms = [g.square().sum() for g in gradients if g is not None]
    return len(logits) * torch.stack(norms).sum()
