"""The findings as a table: the same columns on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seht.measure.bound import BoundResult
from seht.measure.numbers import aligned, duration, number, with_error
from seht.measure.survey import Findings


@dataclass(frozen=True)
class Column:
    """One figure of every model."""

    title: str
    cell: Callable[[Findings], str]


def columns(found: Sequence[Findings]) -> list[Column]:
    """Those with something to show."""
    kind = "tr(G)" if found[0].trace.curvature == "ggn" else "tr(H)"
    every = [
        Column(kind, lambda f: with_error(f.trace.estimate, f.trace.stderr)),
        Column("95 %", _interval),
        Column("loss", lambda f: number(f.trace.loss)),
        Column("|w|", lambda f: number(f.trace.weight_norm)),
        Column("λ max", lambda f: _end(f, 0)),
        Column("λ min", lambda f: _end(f, 1)),
        Column("largest stable lr", lambda f: _rate(f)),
        Column("rise, random", _random),
        Column("rise, adversarial", _adversarial),
        Column("samples", lambda f: f"{f.trace.samples:,}"),
        Column("probes", lambda f: f"{f.trace.probes} {f.trace.method}"),
        Column("time", lambda f: duration(f.trace.seconds)),
    ]
    return [column for column in every if any(column.cell(f) not in ("", "–") for f in found)]


def _interval(found: Findings) -> str:
    low, high = found.trace.interval()
    return "–" if low != low else f"{number(low)} to {number(high)}"


def _end(found: Findings, end: int) -> str:
    if found.eigenvalues is None:
        return ""
    values = (found.eigenvalues.largest, found.eigenvalues.smallest)[end]
    return number(values[0]) if values else "not found"


def _rate(found: Findings) -> str:
    return "" if found.stability is None else number(found.stability.largest_rate)


def _random(found: Findings) -> str:
    s = found.sharpness
    return "" if s is None else with_error(s.random, s.random_stderr)


def _adversarial(found: Findings) -> str:
    return "" if found.sharpness is None else number(found.sharpness.adversarial)


def terminal(found: Sequence[Findings]) -> str:
    """Models as columns, figures as rows; then the layers, and what a reader should know."""
    rows = [["", *(f.name for f in found)]]
    rows += [[column.title, *(column.cell(f) for f in found)] for column in columns(found)]
    lines = aligned(rows)
    layers = [f.trace.layers for f in found]
    if any(layers):
        names = list(dict.fromkeys(name for part in layers for name in part or ()))
        rows = [["trace by layer", *(f.name for f in found)]]
        for name in names:
            cells = [(part or {}).get(name) for part in layers]
            rows.append(
                [name, *("" if c is None else with_error(c.estimate, c.stderr) for c in cells)]
            )
        lines += ["", *aligned(rows)]
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
    if found.bound is not None:
        b = found.bound
        said.append(
            f"derivatives in the logits (section 3.2): mean norm {number(b.jacobian)}, mean trace "
            f"{number(b.hessian)}; {_terms(b)}{b.note}"
        )
    return said


def _terms(bound: BoundResult) -> str:
    if bound.terms is None:
        return ""
    parts = ", ".join(f"{name} {number(value)}" for name, value in bound.terms.items())
    return f"terms of the bound: {parts}, in all {number(bound.total)}, "
