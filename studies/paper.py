"""The tables of docs/evidence/paper.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from draw import Row, interval, rows_of

from seht.lab.report.stats import paired

LEARNT = 0.1
"""A training has converged, for the paper's claim of speed, when an epoch's loss is below it."""


def epochs(run: dict[str, Any]) -> float:
    """Until the training loss is small; all of them where it never is."""
    losses = run["curves"]["train_loss"]
    return next((k + 1 for k, loss in enumerate(losses) if loss < LEARNT), len(losses))


MEASURES: dict[str, tuple[str, Callable[[dict[str, Any]], float], int]] = {
    "accuracy": ("test accuracy, points", lambda run: run["last"]["test_top1"], 2),
    "epochs": (f"epochs to a training loss of {LEARNT}", epochs, 1),
    "trace": ("tr(H) at the end", lambda run: run["trace"], 2),
    "largest": ("largest eigenvalue", lambda run: run["eigenvalues"]["largest"], 3),
    "smallest": ("smallest eigenvalue", lambda run: run["eigenvalues"]["smallest"], 4),
}
PAIRS: dict[str, list[tuple[str, str, str]]] = {
    "gains": [
        ("accuracy", "seht-h printed", "plain"),
        ("accuracy", "seht-d 0.01", "plain"),
        ("accuracy", "seht-d 0.05 10 probes", "plain"),
        ("accuracy", "seht-h 1 probe", "plain"),
        ("accuracy", "seht-d best", "plain"),
        ("accuracy", "tr(G)", "plain"),
    ],
    "speed": [
        ("epochs", key, "plain")
        for key in ("seht-h printed", "seht-d 0.01", "seht-d 0.05 10 probes", "tr(G)")
    ],
    "order": [
        ("accuracy", "seht-h printed", "seht-d 0.01"),
        ("accuracy", "seht-h printed", "seht-d 0.05 10 probes"),
        ("accuracy", "seht-h 1 probe", "seht-d best"),
    ],
    "probes": [
        ("accuracy", "seht-h 5 probes", "seht-h 1 probe"),
        ("accuracy", "seht-h 10 probes", "seht-h 1 probe"),
    ],
    "dropout": [
        ("accuracy", "dropout", "plain"),
        ("accuracy", "dropout + seht-h", "dropout"),
        ("accuracy", "dropout + seht-h", "seht-h 1 probe"),
        ("accuracy", "dropout + seht-d", "dropout"),
        ("accuracy", "dropout + seht-d", "seht-d best"),
    ],
    "flat": [
        (measure, key, "plain")
        for measure in ("trace", "largest")
        for key in ("seht-h printed", "seht-d 0.01", "seht-h 1 probe", "tr(G)")
    ],
    "stability": [
        ("smallest", key, "plain")
        for key in ("seht-h printed", "seht-d 0.01", "seht-h 1 probe", "tr(G)")
    ],
}


def pairs(record: dict[str, Any], claim: str) -> str:
    """Paired differences that a claim is about."""
    rows = rows_of(record, refit=False)
    lines = ["| what | between | difference [95 %] | n |", "| --- | --- | ---: | ---: |"]
    for measure, one, other in PAIRS[claim]:
        if one not in rows or other not in rows:
            continue
        title, value, digits = MEASURES[measure]
        found = paired(_values(rows[one], value), _values(rows[other], value))
        if found is not None:
            cells = [title, f"{one} − {other}", interval(found, digits), str(found.n)]
            lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 2:
        return "*Not run yet: `make study TASK=paper`.*"
    if claim == "stability":
        lines += ["", *(_verdicts(row) for row in rows.values() if "stability" in _any(row))]
    return "\n".join(lines)


def _values(row: Row, value: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    return {seed: value(run) for seed, run in row.runs.items() if "failed" not in run}


def _any(row: Row) -> dict[str, Any]:
    return next((run for run in row.runs.values() if "failed" not in run), {})


def _verdicts(row: Row) -> str:
    found = [run["stability"]["verdict"] for run in row.runs.values() if "stability" in run]
    counted = ", ".join(f"{found.count(word)} {word}" for word in sorted(set(found)))
    return f"- {row.key}: {counted}"


def claims(record: dict[str, Any], what: str) -> str:
    """Of ``studies/claims.py``: means over its seeds, and their range."""
    if what == "bound":
        seeds = list(record["bound"].values())
        lines = ["| | mean | from | to |", "| --- | ---: | ---: | ---: |"]
        lines += [_line(key, [seed[key] for seed in seeds]) for key in seeds[0]]
        return "\n".join(lines)
    seeds = list(record["shares"].values())
    moments = list(seeds[0])
    lines = [f"| | {' | '.join(moments)} |", f"| --- |{' ---: |' * len(moments)}"]
    for key in seeds[0][moments[0]]:
        means = [statistics.fmean(seed[moment][key] for seed in seeds) for moment in moments]
        lines.append(f"| {key} | {' | '.join(f'{value:.3g}' for value in means)} |")
    for p in (0.01, 0.05):
        ratios = [
            statistics.fmean(s[m]["tr(H)"] for s in seeds)
            / statistics.fmean(s[m][f"seht-d {p}"] for s in seeds)
            for m in moments
        ]
        cells = " | ".join(f"{ratio:,.0f}" for ratio in ratios)
        lines.append(f"| tr(H) over seht-d {p}; {1 / (2 * p * p):,.0f} expected | {cells} |")
    return "\n".join(lines)


def _line(key: str, values: list[float]) -> str:
    cells = [f"{value:.3g}" for value in (statistics.fmean(values), min(values), max(values))]
    return f"| {key} | {' | '.join(cells)} |"
