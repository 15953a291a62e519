"""All the measurements that ``seht measure`` makes of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import nn

from seht.errors import unknown
from seht.measure.bound import BoundResult, bound
from seht.measure.data import MICRO_BATCH, Batches, size_of
from seht.measure.density import DensityResult, density
from seht.measure.eigenvalues import EigenvaluesResult, eigenvalues
from seht.measure.keep import evaluating
from seht.measure.landscape import LandscapeResult, landscape
from seht.measure.objective import LossFn
from seht.measure.progress import Report
from seht.measure.results import TraceResult
from seht.measure.robustness import RobustnessResult, check_floating, robustness
from seht.measure.sharpness import SharpnessResult, sharpness
from seht.measure.stability import StabilityResult, stability
from seht.measure.trace import trace
from seht.tensors.trees import is_batch

PARTS = (
    *("trace", "layers", "eigenvalues", "density", "landscape", "sharpness", "robustness"),
    "bound",
)
"""The names of the measurements; ``eigenvalues`` includes the stability of section 3.4."""
FEW = 512
"""The number of examples for measurements that read the data many times."""
DOF = 8
"""Degrees of freedom that make a 95 % interval 2.3 standard errors wide to each side, not 12.7."""


@dataclass(frozen=True)
class Subject:
    """A model to be measured, under a name."""

    name: str
    model: nn.Module
    loss_fn: LossFn
    data: Any
    """A batch, a data set or an iterable that can be read again."""
    batch_dim: int | None = None


@dataclass(frozen=True)
class SurveyPlan:
    """What to measure, and how well."""

    parts: tuple[str, ...] = ("trace", "layers")
    curvature: str = "hessian"
    tol: float | None = None
    probes: int | None = None
    """Replicates for each micro-batch; as many as a useful interval takes by default."""
    samples: int | None = None
    """Read so many examples for the trace; all by default."""
    few: int = FEW
    """How many examples to read for everything else."""
    points: int = 21
    micro_batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(unknown("measurement", part, [*PARTS, "all"]))


@dataclass(frozen=True)
class Findings:
    """The results for one model; ``None`` for what was not asked for."""

    name: str
    trace: TraceResult
    eigenvalues: EigenvaluesResult | None = None
    stability: StabilityResult | None = None
    density: DensityResult | None = None
    landscape: LandscapeResult | None = None
    plane: LandscapeResult | None = None
    """The landscape in two dimensions."""
    sharpness: SharpnessResult | None = None
    robustness: RobustnessResult | None = None
    bound: BoundResult | None = None

    def __str__(self) -> str:
        """The table that ``seht measure`` prints."""
        from seht.measure.table import terminal  # which is made of findings

        return terminal([self])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            key: value.as_dict() if hasattr(value, "as_dict") else value
            for key, value in vars(self).items()
            if value is not None
        }


def survey(subject: Subject, plan: SurveyPlan, progress: Report = None) -> Findings:
    """Measure one model, in evaluation mode, and leave it as it was."""
    with evaluating(subject.model):
        return _survey(subject, plan, progress)


def _survey(subject: Subject, plan: SurveyPlan, progress: Report) -> Findings:
    def ask(part: str, function: Callable[..., Any], **options: Any) -> Any:
        if part not in plan.parts and function is not trace:
            return None
        options |= {"seed": plan.seed, "progress": progress}
        options |= {"batch_dim": subject.batch_dim, "micro_batch": plan.micro_batch}
        return function(subject.model, subject.loss_fn, subject.data, **options)

    if "robustness" in plan.parts:
        check_floating(subject.model)  # the trace would only say that there is nothing to derive
    few: dict[str, Any] = {"limit": plan.few}
    curvature: dict[str, Any] = {"curvature": plan.curvature}
    steady = ask("eigenvalues", stability, largest=8, smallest=3, **few)
    ends = None if steady is None else steady.eigenvalues
    if ends is not None and plan.curvature == "ggn":
        ends = ask("eigenvalues", eigenvalues, largest=8, smallest=1, **few, **curvature)
    return Findings(
        name=subject.name,
        trace=ask(
            "trace", trace, tol=plan.tol, probes=plan.probes or enough(subject, plan),
            limit=plan.samples, per_layer="layers" in plan.parts, **curvature,
        ),
        eigenvalues=ends,
        stability=steady,
        density=ask("density", density, probes=3, steps=30, **few, **curvature),
        landscape=ask("landscape", landscape, points=plan.points, **few),
        plane=ask("landscape", landscape, dims=2, points=(plan.points + 1) // 2 | 1, **few),
        sharpness=ask("sharpness", sharpness, **few),
        robustness=ask("robustness", robustness, **few),
        bound=ask("bound", bound, **few),
    )  # fmt: skip


def enough(subject: Subject, plan: SurveyPlan) -> int:
    """Replicates that give the trace's error :data:`DOF` degrees of freedom, at least two.

    A micro-batch adds one degree less than it has replicates; a tolerance needs no more than two.
    """
    axis, data = subject.batch_dim or 0, subject.data
    if is_batch(data):
        examples = min(size_of(data, axis), plan.samples or size_of(data, axis))
        parts = ceil(examples / (plan.micro_batch or MICRO_BATCH))
    else:
        size, limit = plan.micro_batch, plan.samples
        parts = Batches(data, size=size, axis=axis, limit=limit).total or DOF
    return 2 if plan.tol is not None else 1 + ceil(DOF / max(1, parts))


def choose_parts(texts: Sequence[str]) -> tuple[str, ...]:
    """Names from the command line: several, in one text or more; ``all`` is all of them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return PARTS if "all" in names else tuple(dict.fromkeys(names))
