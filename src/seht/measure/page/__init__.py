"""One self-contained page: no script, no request, light and dark, from phone to desktop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from seht.extras import need
from seht.measure.numbers import duration, number, with_error
from seht.measure.page.drawing import fill
from seht.measure.page.figures import COLOURS, groups
from seht.measure.results import TraceResult
from seht.measure.stats import student
from seht.measure.survey import Findings, figures, notes


def render(found: Sequence[Findings], command: str, versions: Sequence[tuple[str, str]]) -> str:
    """The page's HTML."""
    need("measure", "the page", "jinja2", "matplotlib")
    return fill(
        Path(__file__).parent,
        title="How flat: " + ", ".join(f.name for f in found),
        lead=lead(found),
        facts=_facts(found),
        models=[
            {"name": f.name, "colour": i % COLOURS, "notes": notes(f)} for i, f in enumerate(found)
        ],
        rows=figures(found),
        groups=[(title, hint, panels) for title, hint, panels in groups(found) if panels],
        measured=_measured(found),
        rho=next((f.sharpness.rho for f in found if f.sharpness), 0.0),
        command=command,
        versions=versions,
    )


def lead(found: Sequence[Findings]) -> str:
    """The answer in a sentence or two."""
    kind = "Gauss-Newton trace" if found[0].trace.curvature == "ggn" else "Hessian trace"
    first = found[0].trace
    if len(found) == 1:
        low, high = first.interval()
        said = f"The {kind} of {found[0].name} is {with_error(first.estimate, first.stderr)}"
        if low == low:
            said += f", with 95 % certainty between {number(low)} and {number(high)}"
        return f"{said}, over {first.samples:,} samples."
    ranked = sorted(found, key=lambda f: f.trace.estimate)
    flat, sharp = ranked[0], ranked[-1]
    gap = sharp.trace.estimate - flat.trace.estimate
    error, clear = _difference(sharp.trace, flat.trace)
    return (
        f"The flattest is {flat.name}, with a {kind} of "
        f"{with_error(flat.trace.estimate, flat.trace.stderr)}, the sharpest {sharp.name}, with "
        f"{with_error(sharp.trace.estimate, sharp.trace.stderr)}: a difference of "
        f"{with_error(gap, error)}, whose 95 % interval {'leaves out' if clear else 'holds'} zero."
    )


def _difference(a: TraceResult, b: TraceResult) -> tuple[float, bool]:
    """The error of a difference, and whether its 95 % interval leaves out zero (Welch)."""
    parts = [(t.stderr**2, max(t.dof, 1.0)) for t in (a, b)]
    variance = sum(v for v, _ in parts)
    if not variance > 0:
        return variance, a.estimate != b.estimate and variance == 0
    dof = variance**2 / sum(v**2 / d for v, d in parts)
    error = math.sqrt(variance)
    return error, abs(a.estimate - b.estimate) > student(0.95, max(dof, 1.0)) * error


def _facts(found: Sequence[Findings]) -> list[tuple[str, str]]:
    weights = {sum(x.weights for x in f.trace.layers.values()) for f in found if f.trace.layers}
    facts = [
        ("models", str(len(found))),
        ("samples", _range(sorted({f.trace.samples for f in found}))),
        ("probed weights", _range(sorted(weights))),
        ("probes", ", ".join(sorted({f.trace.method for f in found}))),
        ("time for the traces", duration(sum(f.trace.seconds for f in found))),
    ]
    return [(name, value) for name, value in facts if value]


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    low, high = values[0], values[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _measured(found: Sequence[Findings]) -> set[str]:
    """The parts that some model has."""
    measured = {part for f in found for part, result in vars(f).items() if result}
    return measured | ({"layers"} if any(f.trace.layers for f in found) else set())
