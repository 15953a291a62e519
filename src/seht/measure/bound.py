r"""The generalisation bound behind the penalty (the paper's section 3.2), term by term.

For a *linear* classifier of M classes with weights W and cross-entropy clipped at B, with
probability :math:`1-\delta` over n training examples and up to a constant,

.. math::

    E[\bar\ell] - 1.01\,\hat E[\bar\ell] \lesssim
    \frac{(A\mu)^{2/3} (\theta B)^{1/3}}{n^{1/3}} + \frac{A \sqrt{B\nu\theta}}{\sqrt n}
    + \frac{B A^2 \theta}{n (\log^2 \frac{B A^2 \theta}{\nu n} + 1)} + \zeta ,

    \mu = \hat E \lVert \partial\ell / \partial z \rVert_2, \quad
    \nu = \hat E\, \mathrm{tr}(\partial^2\ell / \partial z^2), \quad
    A = \lVert W^T \rVert_{2,1}, \quad
    \theta = \ln^3(nM) \max_i \lVert x_i \rVert_2^2, \quad
    \zeta = \frac{B (\ln(1/\delta) + \ln\ln n)}{n} .

The derivatives are those of the loss in the *logits* z, as in the original theorem (Wei, Kakade and
Ma, arXiv 2002.12915), not in the weights. The theorem is about linear models; for a deep network
only the two averages :math:`\mu` and :math:`\nu` are given, and nothing is guaranteed by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from seht.engines import loss_in_logits
from seht.errors import check_options, check_positive
from seht.measure.numbers import duration, number, said, with_error
from seht.measure.objective import DataOptions, Objective, measuring
from seht.measure.results import PlainResult
from seht.probes import generator, mix
from seht.task import LossFn

_EXACT = 256
"""Up to so many classes the trace in the logits is exact: one product for each class."""
_PROBES = 16
_PASSIVE = (nn.Sequential, nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)


@dataclass(frozen=True)
class BoundResult(PlainResult):
    """The two averages, and for a linear classifier the terms of the bound."""

    jacobian: float
    """μ: the mean norm of the loss's gradient in the logits."""
    hessian: float
    """ν: the mean trace of its second derivative in the logits."""
    hessian_stderr: float
    """Standard error of ν over probes; 0 up to 256 classes, where ν is exact."""
    linear: bool
    """Whether the model is a linear classifier, as the theorem demands."""
    terms: Mapping[str, float] | None
    """``jacobian``, ``hessian``, ``quadratic`` and ``confidence``, up to the theorem's constant;
    ``None`` for a deep network."""
    constants: Mapping[str, float]
    """The constants n, M, B and delta of the theorem, and for a linear model A and theta."""
    note: str
    seconds: float

    beside = ("total",)

    @property
    def total(self) -> float | None:
        """The sum of the terms."""
        return None if self.terms is None else sum(self.terms.values())

    def __str__(self) -> str:
        rows = [
            ("derivatives in the logits", ""),
            ("mean norm of the gradient", number(self.jacobian)),
            ("mean trace of the Hessian", with_error(self.hessian, self.hessian_stderr)),
            *((f"term: {name}", number(value)) for name, value in (self.terms or {}).items()),
            *([] if self.total is None else [("all terms", number(self.total))]),
        ]
        return said(f"{self.note}; {duration(self.seconds)}", rows)


def bound(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    cap: float = 1.0,
    delta: float = 0.05,
    boundary: str | None = None,
    **options: Unpack[DataOptions],
) -> BoundResult:
    """The terms of the paper's generalisation bound (section 3.2; Wei et al., arXiv 2002.12915).

    With ℓ the loss of one example and z its logits, the bound depends on two averages over the
    training data: μ = mean |∂ℓ/∂z| and ν = mean tr(∂²ℓ/∂z²). It is proved for linear classifiers
    only; for a deep network the two averages are all there is.

    Cost: a forward pass over the data, and a backward pass through the loss alone for each class
    (beyond 256 classes, for each of 16 probes).

    Example:
        ```python
        print(seht.measure.bound(model, loss_fn, batch))
        ```

    Args:
        model: as in :func:`seht.measure.trace`.
        loss_fn: the mean cross-entropy of a batch, made from the logits that the model returns.
        data: the training examples.
        cap: B, the value at which the loss is clipped.
        delta: the bound holds with probability 1 − delta.
        boundary: the name of the module whose outputs are the logits, if it is not the model.
        options: ``seed`` (of the probes, with many classes), ``progress``, ``micro_batch``,
            ``batch_dim`` and ``limit``, as in :func:`seht.measure.trace`.
    """
    check_options(bound, options, DataOptions.__annotations__)
    check_positive("cap", cap)
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, not {delta!r}")
    layer = _only_linear(model)
    parts = []
    chosen: dict[str, Any] = {"params": lambda name, tensor: True, "boundary": boundary}
    with measuring("bound", model, loss_fn, data, **chosen, **options) as m:
        for place, (batch, _) in enumerate(m.read()):
            parts.append(_averages(m.objective, batch, layer, mix(m.seed, 17, place)))
            m.tell(place + 1, m.batches.total)
    n, classes = sum(part.rows for part in parts), parts[-1].classes
    jacobian = sum(part.rows * part.jacobian for part in parts) / n
    hessian = sum(part.rows * float(part.hessian.mean()) for part in parts) / n
    variance = sum(
        part.rows**2 * float(part.hessian.var()) / len(part.hessian)
        for part in parts
        if len(part.hessian) > 1
    )
    constants: dict[str, float] = {"n": n, "M": classes, "B": cap, "delta": delta}
    terms = None
    if layer is None:
        note = (
            "a deep network: the theorem is about linear classifiers, so these are two empirical "
            "averages and no bound"
        )
    else:
        size = _size(layer)
        theta = math.log(n * classes) ** 3 * max(part.longest for part in parts)
        constants |= {"A": size, "theta": theta}
        terms = _terms(jacobian, hessian, size, theta, cap, delta, n)
        note = "up to the theorem's constant; a bias counts as a weight of a constant input 1"
    return BoundResult(
        jacobian=jacobian,
        hessian=hessian,
        hessian_stderr=math.sqrt(variance) / n,
        linear=layer is not None,
        terms=terms,
        constants=constants,
        note=note,
        seconds=m.seconds,
    )


class _Averages(NamedTuple):
    """Averages over the rows of logits of one micro-batch."""

    rows: int
    classes: int
    jacobian: float
    hessian: Tensor
    """Replicates of the mean trace; one where it is exact."""
    longest: float
    """The largest squared input of the linear layer."""


def _averages(objective: Objective, batch: Any, layer: nn.Linear | None, seed: int) -> _Averages:
    longest = [0.0]

    def see(layer: nn.Module, inputs: Any) -> None:
        constant = 0.0 if layer.bias is None else 1.0
        longest.append(float(inputs[0].detach().double().square().sum(-1).max()) + constant)

    handle = None if layer is None else layer.register_forward_pre_hook(see)
    closure, boundary = objective.closure(batch), objective.boundary
    try:
        with loss_in_logits(objective.model, closure, objective.chosen, boundary) as (z, g):
            classes, rows = z.shape[-1], z.numel() // z.shape[-1]
            # The loss is a mean over rows: rows times its gradient is that of each row's loss.
            jacobian = float((rows * g.detach().double()).norm(dim=-1).mean())
            hessian = _trace(g, z, classes, seed)
    finally:
        if handle is not None:
            handle.remove()
    return _Averages(rows, classes, jacobian, hessian, max(longest))


def _trace(g: Tensor, z: Tensor, classes: int, seed: int) -> Tensor:
    """The mean over rows of tr(d2l/dz2): exact as one number, or replicates by probes."""
    exact = classes <= _EXACT
    found = []
    for k in range(classes if exact else _PROBES):
        if exact:
            way = torch.zeros_like(z)
            way[..., k] = 1
        else:
            bits = torch.randint(2, z.shape, generator=generator(mix(seed, k)))
            way = (2 * bits - 1).to(z)
        (product,) = torch.autograd.grad((g * way).sum(), z, retain_graph=True)
        # The sum over rows of n * (d2L/dz2), divided by n rows.
        found.append((product * way).sum(dtype=torch.float64))
    values = torch.stack(found).cpu()
    return values.sum().reshape(1) if exact else values


def _only_linear(model: nn.Module) -> nn.Linear | None:
    """The one linear layer of a linear classifier, if the model is one."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = [m for m in model.modules() if not isinstance(m, (*_PASSIVE, nn.Linear))]
    return layers[0] if len(layers) == 1 and not others else None


def _size(layer: nn.Linear) -> float:
    """The sum of the norms of the classes' weight vectors, biases among them."""
    squares = layer.weight.detach().double().square().sum(1)
    if layer.bias is not None:
        squares = squares + layer.bias.detach().double().square()
    return float(squares.sqrt().sum())


def _terms(
    mu: float, nu: float, a: float, theta: float, b: float, delta: float, n: int
) -> dict[str, float]:
    ratio = b * a**2 * theta / (nu * n) if nu > 0 else math.inf
    quadratic = b * a**2 * theta / (n * (math.log(ratio) ** 2 + 1)) if ratio > 0 else 0.0
    return {
        "jacobian": (a * mu) ** (2 / 3) * (theta * b) ** (1 / 3) / n ** (1 / 3),
        "hessian": a * math.sqrt(b * max(nu, 0.0) * theta) / math.sqrt(n),
        "quadratic": quadratic,
        # ln ln n is negative below e: the theorem means large n.
        "confidence": b * (math.log(1 / delta) + math.log(max(1.0, math.log(max(n, 2))))) / n,
    }
