r"""The estimators: the paper's two, and one with a probe for each example.

With probes :math:`\sigma_1 .. \sigma_K` an estimate is

.. math:: \frac{\mathrm{scale}}{K} \sum_k \sigma_k^T H \sigma_k .

An estimator says three things: which of the chosen tensors ("layers") take part in a step, how
the entries of a probe are drawn, and the scale. The products :math:`\sigma^T H \sigma`, lines 4 to
7 of the paper's Algorithms 1 and 2, are the engines' part: ``engines/autograd.py`` has them as
printed.

``HessianTrace(estimator=...)`` takes any object with the members of :class:`Estimator`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from seht import probes as draw
from seht.errors import check_count, options_of, unknown

_DISTRIBUTIONS = ("rademacher", "gaussian")
_COUPLINGS = ("refuse", "own", "frozen")


@runtime_checkable
class Estimator(Protocol):
    """What an engine needs from an estimator; an object with these members is one."""

    @property
    def name(self) -> str:
        """The name in records and tables."""

    @property
    def probes(self) -> int:
        """K, the paper's maxIter."""

    @property
    def scale(self) -> float:
        """The factor on the mean of the products."""

    @property
    def signs(self) -> bool:
        """Whether every entry of a probe is 1 or -1, so that its norm is known without a look."""

    def layers(self, count: int, seed: int) -> tuple[int, ...]:
        """Which of ``count`` tensors are drawn in this step."""

    def entries(self, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        """The probe's entries for one tensor: int8 signs or floating-point numbers."""


@dataclass(frozen=True, kw_only=True)
class SehtH:
    """SEHT-H, the paper's Algorithm 1: Hutchinson's estimator of the whole trace.

    Every entry of every chosen tensor is +1 or −1 with probability 1/2, so that E[s sᵀ] = I and
    E[sᵀ H s] = tr(H) (Hutchinson, Communications in Statistics 19, 1990).

    Cost: 1 + 2 K plain steps with K probes, so three with one; 1 + K with `curvature="ggn"`.

    Args:
        probes: K, the paper's maxIter: the number of probes averaged.
        distribution: `"rademacher"` (the paper's) or `"gaussian"` (more variance).

    Example:
        ```python
        penalty = seht.HessianTrace(model, weight=1e-4, estimator=seht.SehtH(probes=2))
        ```
    """

    probes: int = 1
    distribution: str = "rademacher"

    name = "seht-h"
    scale = 1.0

    def __post_init__(self) -> None:
        check_count("probes", self.probes)
        _check_distribution(self.distribution)

    @property
    def signs(self) -> bool:
        """Whether every entry is 1 or -1."""
        return self.distribution == "rademacher"

    def layers(self, count: int, seed: int) -> tuple[int, ...]:
        """Every tensor."""
        return tuple(range(count))

    def entries(self, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        """Rademacher signs, or normal numbers."""
        if self.distribution == "gaussian":
            return draw.gaussian(shape, seed, device)
        return draw.rademacher(shape, seed, device)


@dataclass(frozen=True, kw_only=True)
class SehtD:
    """SEHT-D, the paper's Algorithm 2: 2 p₁ p₂ tr(H) from a few entries of a few tensors.

    Each tensor is kept with probability p₁; in a kept tensor every entry is +1 or −1 with
    probability p₂ each, else 0. So it estimates 2 p₁ p₂ tr(H), which the paper does not rescale: at
    equal weight SEHT-D is 1 / (2 p₁ p₂) times weaker than SEHT-H, 200 times at p = 0.05, 5,000
    times at p = 0.01. `rescale=True` divides by 2 p₁ p₂ and is unbiased for tr(H).

    Cost: a step on which no tensor is kept is a plain step. The others cost less than with SEHT-H,
    because the layers before the first kept tensor are computed once. On a ResNet-18 a step takes
    on average 1.2 plain ones at p = 0.01 and 1.9 at p = 0.05.

    Args:
        probes: K, the paper's maxIter: the number of probes averaged.
        prob: p₂, in (0, 0.5].
        layer_prob: p₁, in (0, 1]; `prob` if not given, as in the paper.
        rescale: divide by 2 p₁ p₂.
        distribution: of the nonzero entries: `"rademacher"` (the paper's) or `"gaussian"`.

    Example:
        ```python
        penalty = seht.HessianTrace(model, weight=1e-3, estimator=seht.SehtD(prob=0.05))
        ```
    """

    probes: int = 1
    prob: float = 0.05
    layer_prob: float | None = None
    rescale: bool = False
    distribution: str = "rademacher"

    name = "seht-d"
    signs = False

    def __post_init__(self) -> None:
        check_count("probes", self.probes)
        _check_distribution(self.distribution)
        _check_range("prob", self.prob, 0.5, "each sign has probability prob")
        if self.layer_prob is not None:
            _check_range(
                "layer_prob", self.layer_prob, 1.0, "a layer is kept with that probability"
            )

    @property
    def keep(self) -> float:
        """p1, the probability that a layer takes part."""
        return self.prob if self.layer_prob is None else self.layer_prob

    @property
    def scale(self) -> float:
        """1, or 1 / (2 p1 p2) when rescaled."""
        return 1.0 / (2 * self.keep * self.prob) if self.rescale else 1.0

    def layers(self, count: int, seed: int) -> tuple[int, ...]:
        """Each tensor with probability p1, independently."""
        draws = torch.rand(count, generator=draw.generator(seed), dtype=torch.float64, device="cpu")
        return tuple(i for i, u in enumerate(draws.tolist()) if u < self.keep)

    def entries(self, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        """Entries of Q(p2)."""
        signs = draw.sparse_signs(shape, self.prob, seed, device)
        if self.distribution == "gaussian":
            return draw.gaussian(shape, draw.mix(seed, 3), device) * signs.abs()
        return signs


@dataclass(frozen=True, kw_only=True)
class SehtS:
    """SEHT-S: Hutchinson's estimator with a probe of its own for every example of the batch.

    The loss is a sum over examples, L = Σ Lₙ, so that tr(H) = Σ tr(Hₙ) and each example may have
    its own probe sₙ = S ∘ rₙ qₙᵀ (`persample/signs.py`; flipout, arXiv 1803.04386). The estimate is
    unbiased too, and its error falls with the number of examples. It needs the difference engine,
    and a loss that does not mix examples before it sums over them.

    Cost: about 3.5 plain steps, 2.3 with `curvature="ggn"`; without the elementwise work it would
    be three and two.

    Args:
        probes: the number of probes averaged, for each example.
        batch_dim: the dimension of the model's inputs that holds the examples; if not given, it is
            found by following the examples through the model.
        coupling: what to do if the model mixes examples. `"refuse"` raises an error. `"own"`
            estimates Σ tr(Hₙₙ), the trace as if every example had its own copy of the weights; how
            one example's copy changes another's loss is left out. `"frozen"` takes the batch
            statistics of train-mode BatchNorm as constants in the trace; the penalty's gradient
            still flows through them.

    Example:
        ```python
        penalty = seht.HessianTrace(model, weight=1e-4, estimator="seht-s")
        ```
    """

    probes: int = 1
    batch_dim: int | None = None
    coupling: str = "refuse"

    name = "seht-s"
    scale = 1.0
    signs = True

    def __post_init__(self) -> None:
        check_count("probes", self.probes)
        if self.coupling not in _COUPLINGS:
            raise ValueError(unknown("coupling", self.coupling, _COUPLINGS))
        dim = self.batch_dim
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise ValueError(f"batch_dim must be a dimension (0, 1, ...) or None, not {dim!r}")

    def layers(self, count: int, seed: int) -> tuple[int, ...]:
        """Every tensor."""
        return tuple(range(count))

    def entries(self, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        """S, the Rademacher signs that all examples share."""
        return draw.rademacher(shape, seed, device)


ESTIMATORS: dict[str, type[SehtH] | type[SehtD] | type[SehtS]] = {
    "seht-h": SehtH,
    "seht-d": SehtD,
    "seht-s": SehtS,
}


def make(
    estimator: str | Estimator,
    options: dict[str, Any],
    caller: Callable[..., object],
    beside: Iterable[str] = (),
) -> Estimator:
    """The estimator of that name with these options, or the user's own object as it is.

    A misspelt option is an error of ``caller``, whose own arguments may have been meant, or the
    options that it takes ``beside`` those of the estimator.
    """
    if not isinstance(estimator, str):
        if not isinstance(estimator, Estimator) or isinstance(estimator, type):
            raise TypeError(
                f"estimator must be a name ({_names(ESTIMATORS)}) or an estimator object "
                "such as seht.SehtH(), with every member of seht.estimators.Estimator, not "
                f"{estimator!r}"
            )
        if options:
            raise ValueError(
                f"{_names(options)} cannot be given beside an estimator object; "
                "set it where the object is made"
            )
        check_count("probes", estimator.probes)
        return estimator
    if estimator not in ESTIMATORS:
        raise ValueError(unknown("estimator", estimator, ESTIMATORS))
    cls = ESTIMATORS[estimator]
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            others = [name for name, c in ESTIMATORS.items() if hasattr(c, option)]
            if others:
                raise ValueError(f"{option} is an option of {_names(others)}, not of {estimator}")
            meant = unknown("option", option, [*known, *options_of(caller), *beside])
            raise ValueError(f"{caller.__name__}(estimator={estimator!r}): {meant}")
    return cls(**options)


def _names(items: Any) -> str:
    return ", ".join(map(str, items))


def _check_distribution(distribution: str) -> None:
    if distribution not in _DISTRIBUTIONS:
        raise ValueError(unknown("distribution", distribution, _DISTRIBUTIONS))


def _check_range(name: str, value: float, top: float, why: str) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value <= top:
        raise ValueError(f"{name} must be in (0, {top:g}], not {value!r}: {why}")
