"""The findings as a table: the same figures on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seht.measure.bound import BoundResult
from seht.measure.numbers import aligned, duration, number, with_error
from seht.measure.robustness import LAYER_BITS
from seht.measure.survey import Findings

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
