"""Terms that are added to the loss, out of its own forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seht import probes
from seht.lab.config import KINDS
from seht.lab.methods.base import Closure, Forward, Method, Run, at_least, not_negative
from seht.lab.methods.loss import over_labels


class ConfidencePenalty(Method):
    r"""Uncertainty is rewarded: the entropy of the predictions is taken from the loss.

    Cross-entropy **minus** :math:`\beta\,\mathrm{mean}_i H(p_i)`.

    Pereyra et al., arXiv 1701.06548.

    Args:
        weight: beta (0.001 on CIFAR-10, 0.1 on CIFAR-100 in the paper).
    """

    name = "confidence-penalty"

    def __init__(self, *, weight: float = 0.1) -> None:
        self.weight = not_negative("weight", weight)

    def term(self, forward: Forward) -> Tensor:
        return -self.weight * entropy(forward.logits).mean()


def entropy(logits: Tensor) -> Tensor:
    r""":math:`-\sum_k p_k \log p_k` of each example."""
    logp = F.log_softmax(logits, dim=1)
    return -(logp.exp() * logp).sum(1)


class NontargetUniform(Method):
    r"""Wrong classes are to be equally likely (a stand-in for MM + FRL).

    Cross-entropy plus :math:`\lambda\,KL(u \,\Vert\, q)`.

    q is p restricted to the wrong classes and renormalised, u uniform on them. A **stand-in** for
    the minimax part of MM + FRL (arXiv 2011.10951), whose formulas are not public in reachable
    form; the paper's figure for MM + FRL is not this method's.

    Args:
        weight: lambda.
    """

    name = "nontarget-uniform"

    def __init__(self, *, weight: float = 0.01) -> None:
        self.weight = not_negative("weight", weight)

    def term(self, forward: Forward) -> Tensor:
        """For mixed labels the mix of both divergences."""
        return self.weight * over_labels(
            forward.batch, lambda y: nontarget_divergence(forward.logits, y).mean()
        )


def nontarget_divergence(logits: Tensor, y: Tensor) -> Tensor:
    r""":math:`KL = -\log(K - 1) - \frac{1}{K - 1} \sum_{k \neq y} \log q_k` of each example."""
    wrong = logits.shape[1] - 1
    target = torch.zeros_like(logits, dtype=torch.bool).scatter(1, y[:, None], True)
    total = torch.logsumexp(logits.masked_fill(target, -math.inf), dim=1)
    mean = logits.masked_fill(target, 0).sum(1) / wrong
    return total - mean - math.log(wrong)


class Jacobian(Method):
    r"""The squared norm of the logits' derivative in the input, added to the loss.

    Cross-entropy plus :math:`\lambda R`, with
    :math:`R = \frac12 \mathrm{mean}_i \lVert \partial z_i / \partial x_i \rVert_F^2` of the logits.

    Hoffman et al., arXiv 1908.02729.

    Args:
        weight: lambda.
        projections: random ones for the estimate; 0 takes all K classes, which is exact.
    """

    name = "jacobian"
    tasks = frozenset(KINDS) - {"text"}
    input_gradient = True

    def __init__(self, *, weight: float = 0.01, projections: int = 1) -> None:
        self.weight = not_negative("weight", weight)
        self.projections = at_least("projections", projections, 0)

    def term(self, forward: Forward) -> Tensor:
        """With the graph of the closure's own forward pass."""
        norm = squared_jacobian(forward.batch.x, forward.logits, self.projections)
        return self.weight * norm / 2


def squared_jacobian(x: Tensor, z: Tensor, projections: int) -> Tensor:
    r"""The mean over examples of :math:`\lVert J_i \rVert_F^2`, differentiable.

    With v uniform on the unit sphere :math:`E \lVert v^T J \rVert^2 = \lVert J \rVert_F^2 / K`, so
    that K times the mean over the projections is unbiased. All examples share one backward pass:
    with BatchNorm their derivatives in each other are counted too, as in the authors' code.
    """
    classes = z.shape[1]
    total = z.new_zeros(())
    for k in range(projections or classes):
        if projections:
            v = F.normalize(torch.randn_like(z), dim=1)
        else:
            v = torch.zeros_like(z)
            v[:, k] = 1
        (row,) = torch.autograd.grad((v * z).sum(), x, create_graph=True)
        total = total + row.square().sum()
    scale = classes / projections if projections else 1.0
    return scale * total / len(z)


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
