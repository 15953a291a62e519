r"""Linear stability of gradient flow at a model (the paper's section 3.4).

Gradient descent with small steps follows :math:`\dot w = -g(w)`, whose Jacobian is :math:`-H`. A
trained network is rarely an equilibrium exactly, and an over-parametrised one has eigenvalues of
zero, where linear theory is silent: the result says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import Unpack

from seht.errors import check_options
from seht.measure.eigenvalues import EigenvaluesResult, Search
from seht.measure.objective import Options, measuring
from seht.measure.results import PlainResult
from seht.task import LossFn


@dataclass(frozen=True)
class StabilityResult(PlainResult):
    """What linear theory says about gradient flow and gradient descent here."""

    verdict: str
    """``stable``, ``unstable`` (also where the smallest eigenvalue is only bounded, from above, by
    a negative number), ``marginal`` (an eigenvalue of 0 within its error), or ``undecided`` (the
    eigenvalues were not found)."""
    equilibrium: bool
    """Whether the gradient vanishes, to the tolerance."""
    distance: float
    """|g| / (|λ|_max |w|): the relative weight change that the gradient asks for along the
    stiffest direction; 0 at an equilibrium."""
    gradient_norm: float
    jacobian: tuple[float, ...]
    """The computed eigenvalues of −H, the Jacobian of the flow; the least stable come first."""
    jacobian_errors: tuple[float, ...]
    """Bounds on their errors."""
    largest_rate: float | None
    """2 / lambda_max, above which gradient descent diverges along the stiffest direction; ``None``
    where no curvature limits it. Where the verdict is ``unstable`` no rate makes it converge."""
    largest_rate_interval: tuple[float, float] | None
    samples: int
    weight_norm: float
    seconds: float
    eigenvalues: EigenvaluesResult
    """The eigenvalues of H."""

    def __str__(self) -> str:
        here = "an equilibrium" if self.equilibrium else "no equilibrium"
        limit = "no curvature limits the learning rate of gradient descent"
        if self.largest_rate is not None:
            limit = (
                "along the stiffest direction gradient descent diverges above a learning rate of "
                f"{self.largest_rate:.3g}"
            )
        flow = f"linearised gradient flow is {self.verdict}"
        if self.verdict == "unstable":
            flow += "; no learning rate makes gradient descent settle here"
        return f"{here} (|g| = {self.gradient_norm:.3g}); {flow}; {limit}"


def stability(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    largest: int = 3,
    smallest: int = 3,
    equilibrium: float = 1e-3,
    tol: float = 1e-4,
    max_products: int = 500,
    solver: str = "arpack",
    **options: Unpack[Options],
) -> StabilityResult:
    """Is the model an equilibrium of gradient flow, is it stable, and up to which learning rate?

    The flow ẇ = −g(w) is at an equilibrium where the gradient g is about 0. The equilibrium is
    stable if every eigenvalue of H is positive, and gradient descent stays there with learning
    rates below 2 / λ_max (the paper's section 3.4).

    Cost: that of :func:`seht.measure.eigenvalues`, and one gradient over the data.

    Example:
        ```python
        print(seht.measure.stability(model, loss_fn, batch, solver="lanczos"))
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: the data to measure on.
        largest: how many eigenvalues of H to compute at the upper end.
        smallest: how many at the lower end, which decides about stability.
        equilibrium: the model counts as an equilibrium if |g| / (|λ|_max |w|) is at most this.
        tol: as in :func:`seht.measure.eigenvalues`.
        max_products: as in :func:`seht.measure.eigenvalues`.
        solver: as in :func:`seht.measure.eigenvalues`.
        options: ``seed`` (of the start vector), ``progress``, ``params``, ``micro_batch``,
            ``batch_dim`` and ``limit``, as in :func:`seht.measure.trace`.
    """
    check_options(stability, options, Options.__annotations__)
    if not equilibrium > 0:
        raise ValueError(f"equilibrium must be a positive number, not {equilibrium!r}")
    search = Search(largest, smallest, tol, max_products, solver)
    with measuring("stability", model, loss_fn, data, **options) as m:
        gradient = float(m.gradient().norm())
        found = search(m)
    pairs = [
        *zip(found.largest, found.largest_residuals, strict=True),
        *zip(found.smallest, found.smallest_residuals, strict=True),
    ]
    # In a small matrix the two ends meet, and an eigenvalue may be in both.
    flow = sorted({(-value, error) for value, error in pairs}, reverse=True)
    scale = max((abs(value) for value, _ in flow), default=0.0)
    size = scale * found.weight_norm
    distance = gradient / size if size > 0 else (math.inf if gradient > 0 else 0.0)
    rate, interval = _rate(found)
    return StabilityResult(
        verdict=_verdict(found, scale),
        equilibrium=distance <= equilibrium,
        distance=distance,
        gradient_norm=gradient,
        jacobian=tuple(value for value, _ in flow),
        jacobian_errors=tuple(error for _, error in flow),
        largest_rate=rate,
        largest_rate_interval=interval,
        samples=found.samples,
        weight_norm=found.weight_norm,
        seconds=found.seconds,
        eigenvalues=found,
    )


def _verdict(found: EigenvaluesResult, scale: float) -> str:
    if not found.smallest:
        return "undecided"
    lowest, error = found.smallest[0], found.smallest_residuals[0]
    zero = scale * (1e-4 if found.differences else 1e-6)  # what rounding leaves of a zero
    # A Rayleigh quotient: the smallest eigenvalue is at most this, however large the residual.
    if lowest < -zero:
        return "unstable"
    if not found.converged:
        return "undecided"
    return "stable" if lowest > max(error, zero) else "marginal"


def _rate(found: EigenvaluesResult) -> tuple[float | None, tuple[float, float] | None]:
    if not found.largest or found.largest[0] <= 0:
        return None, None
    value, error = found.largest[0], found.largest_residuals[0]
    high = 2 / (value - error) if value > error else math.inf
    return 2 / value, (2 / (value + error), high)
