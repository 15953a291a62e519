"""All the measurements that ``seht measure`` makes of one model, and their table: the same figures
on the terminal and on the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from seht.errors import unknown
from seht.measure.bound import BoundResult, bound
from seht.measure.data import MICRO_BATCH, Batches, size_of
from seht.measure.density import DensityResult, density
from seht.measure.eigenvalues import EigenvaluesResult, eigenvalues
from seht.measure.keep import evaluating
from seht.measure.landscape import LandscapeResult, landscape
from seht.measure.numbers import aligned, duration, number, with_error
from seht.measure.progress import Report
from seht.measure.results import PlainResult, TraceResult
from seht.measure.robustness import LAYER_BITS, RobustnessResult, check_floating, robustness
from seht.measure.sharpness import SharpnessResult, sharpness
from seht.measure.stability import StabilityResult, stability
from seht.measure.trace import trace
from seht.task import LossFn
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
class Findings(PlainResult):
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
        return terminal([self])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, of what was asked for."""
        return {key: value for key, value in super().as_dict().items() if value is not None}


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
        parts = math.ceil(examples / (plan.micro_batch or MICRO_BATCH))
    else:
        size, limit = plan.micro_batch, plan.samples
        parts = Batches(data, size=size, axis=axis, limit=limit).total or DOF
    return 2 if plan.tol is not None else 1 + math.ceil(DOF / max(1, parts))


def choose_parts(texts: Sequence[str]) -> tuple[str, ...]:
    """Names from the command line: several, in one text or more; ``all`` is all of them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return PARTS if "all" in names else tuple(dict.fromkeys(names))


# --- the table --------------------------------------------------------------------------------

Cell = Callable[[Any], str]


def figures(found: Sequence[Findings]) -> list[tuple[str, list[str]]]:
    """The title and each model's cell, for all figures that some model has."""
    kind = "tr(G)" if found[0].trace.curvature == "ggn" else "tr(H)"
    robust = [f.robustness for f in found if f.robustness is not None]
    every: list[tuple[str, str, Cell]] = [
        (kind, "trace", lambda t: with_error(t.estimate, t.stderr)),
        ("95 %", "trace", lambda t: _interval(*t.interval())),
        ("loss", "trace", lambda t: number(t.loss)),
        ("|w|", "trace", lambda t: number(t.weight_norm)),
        ("λ max", "eigenvalues", lambda e: _first(e.largest)),
        ("λ min", "eigenvalues", lambda e: _first(e.smallest)),
        ("lr limit, 2 / λ max", "stability", lambda s: number(s.largest_rate)),
        ("rise, random", "sharpness", lambda s: with_error(s.random, s.random_stderr)),
        ("rise, adversarial", "sharpness", lambda s: number(s.adversarial)),
    ]
    for bits in dict.fromkeys(bits for r in robust for bits in r.rounded):
        every.append((f"rise, {bits} bits", "robustness", _rounded(bits)))
    for share in dict.fromkeys(share for r in robust for share in r.noise):
        title = f"rise, {100 * share:.3g} % noise"
        every.append((title, "robustness", _noise(share)))
        every.append(("... by the trace", "robustness", _predicted(share)))
    every += [
        ("samples", "trace", lambda t: f"{t.samples:,}"),
        ("probes", "trace", lambda t: f"{t.probes} {t.method}"),
        ("time", "trace", lambda t: duration(t.seconds)),
    ]
    rows = []
    for title, part, cell in every:
        parts = [getattr(f, part) for f in found]
        rows.append((title, ["" if result is None else cell(result) for result in parts]))
    return [(title, cells) for title, cells in rows if any(c not in ("", "–") for c in cells)]


def _interval(low: float, high: float) -> str:
    return "–" if low != low else f"{number(low)} to {number(high)}"


def _first(values: Sequence[float]) -> str:
    return number(values[0]) if values else "not found"


def _rounded(bits: int) -> Cell:
    return lambda found: number(found.rounded[bits])


def _noise(share: float) -> Cell:
    return lambda found: with_error(found.noise[share].rise, found.noise[share].stderr)


def _predicted(share: float) -> Cell:
    return lambda found: with_error(
        found.noise[share].predicted, found.noise[share].predicted_stderr
    )


def terminal(found: Sequence[Findings]) -> str:
    """Models as columns, figures as rows; then the layers, and what a reader should know."""
    models = [f.name for f in found]
    lines = aligned([["", *models], *([title, *cells] for title, cells in figures(found))])
    tables: list[tuple[str, list[Mapping[str, Any]], Cell]] = [
        (
            "trace by layer",
            [f.trace.layers or {} for f in found],
            lambda layer: with_error(layer.estimate, layer.stderr),
        ),
        (
            f"rise, {LAYER_BITS} bits in one layer",
            [{} if f.robustness is None else f.robustness.layers for f in found],
            number,
        ),
    ]
    for title, layers, cell in tables:
        names = list(dict.fromkeys(name for part in layers for name in part))
        if names:
            rows = [
                [name, *(cell(part[name]) if name in part else "" for part in layers)]
                for name in names
            ]
            lines += ["", *aligned([[title, *models], *rows])]
    said = [f"{f.name}: {note}" for f in found for note in notes(f)]
    return "\n".join([*lines, *([""] if said else []), *said])


def notes(found: Findings) -> list[str]:
    """What a reader should know about one model's figures."""
    said = list(found.trace.notes)
    error = found.trace.sampling_stderr
    if error is not None:
        far = (
            f"the whole data's trace may differ by {number(error, 2)} more (standard error)"
            if math.isfinite(error)
            else "how far the whole data's trace is from theirs takes two micro-batches or more to "
            "tell (--micro-batch)"
        )
        said.append(f"only {found.trace.samples:,} samples were read; {far}")
    if found.eigenvalues is not None and not found.eigenvalues.converged:
        said.append("not all eigenvalues were found to the tolerance")
    if found.stability is not None:
        said.append(str(found.stability))
    if found.robustness is not None:
        r = found.robustness
        free = sum(rise <= 0.01 * abs(r.loss) for rise in r.layers.values())
        said.append(
            f"{free} of {len(r.layers)} layers take {LAYER_BITS} bits, each alone, for at most 1 % "
            "of the loss"
        )
    if found.bound is not None:
        b, terms = found.bound, ""
        if b.terms is not None:
            parts = ", ".join(f"{name} {number(value)}" for name, value in b.terms.items())
            terms = f"terms of the bound: {parts}, in all {number(b.total)}, "
        said.append(
            f"derivatives in the logits (section 3.2): mean norm {number(b.jacobian)}, mean trace "
            f"{number(b.hessian)}; {terms}{b.note}"
        )
    return said
