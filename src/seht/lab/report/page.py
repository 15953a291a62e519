"""One self-contained page: no script, no request, light and dark, from phone to desktop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seht.lab.fields import to_text
from seht.lab.report import figures, words
from seht.lab.report.columns import GROUPS, Column, columns
from seht.lab.report.rows import MethodRow, ReportTable
from seht.lab.report.table import is_best
from seht.measure.numbers import duration
from seht.measure.page.drawing import fill

COLOURS = 10
"""The number of colours in the style sheet; with more methods they repeat, dashed."""
FORWARD = 6
"""How many methods stand out in the figures until the reader picks others."""


@dataclass(frozen=True)
class Interval:
    """A difference drawn in its cell: places in per cent of the width, zero at 50."""

    low: float
    width: float
    centre: float
    clear: str
    """``better``, ``worse`` or empty, after Holm's correction."""
    beyond: str
    """``left``, ``right`` or both, where it goes on outside the drawing."""


def render(table: ReportTable) -> str:
    """The page's HTML."""
    every = columns(table)
    comparison = table.comparison
    return fill(
        Path(__file__).parent,
        title=words.title(table),
        lead=words.lead(table),
        facts=_facts(table),
        tables=[(group, _grid(table, [c for c in every if c.group == group])) for group in GROUPS],
        baseline=comparison.baseline,
        printed=[column for column in every if column.figure == "paper"],
        quoted=table.quoted,
        warning=words.other_recipe(table),
        legend=_legend(table),
        colours=COLOURS,
        convergence=figures.convergence(table),
        flatness=figures.flatness(table),
        gaps=words.gaps(table),
        glossary=list(words.glossary(table)),
        recipe=[(name, to_text(value)) for name, value in words.flat(comparison.recipe)],
        command=words.command(comparison),
        versions=_versions(table),
    )


def _facts(table: ReportTable) -> list[tuple[str, str]]:
    """What the reader needs to know before the table."""
    recipe = table.comparison.recipe
    data, model = recipe["data"], recipe.get("model") or {}
    found = [
        ("data", f"{data['name']}" + (f", {data['size']:,} examples" if data.get("size") else "")),
        ("labels", f"{100 * data['noise']:g} % replaced at random" if data.get("noise") else ""),
        ("validation", "trained on too" if table.comparison.refit else ""),
        ("network", str(model.get("name", ""))),
        ("epochs", str(recipe.get("epochs", ""))),
        ("batch", str(recipe.get("batch", ""))),
        ("seeds", str(len(table.comparison.seeds))),
        ("one run", _longest(table)),
    ]
    return [(name, value) for name, value in found if value]


def _longest(table: ReportTable) -> str:
    times = [row.figures["seconds"].value for row in table.rows if "seconds" in row.figures]
    times = [seconds for seconds in times if math.isfinite(seconds)]
    if not times:
        return ""
    low, high = duration(min(times)), duration(max(times))
    return low if low == high else f"{low} to {high}"


def _grid(table: ReportTable, shown: Sequence[Column]) -> dict[str, Any]:
    """Head and body of one table."""
    reach = drawn_reach(table.rows)
    body = [
        {
            "row": row,
            "cells": [_cell(table, row, column, reach) for column in shown],
            "rule": number > 0 and row.ours and not table.rows[number - 1].ours,
        }
        for number, row in enumerate(table.rows)
    ]
    return {"columns": shown, "body": body}


def _cell(table: ReportTable, row: MethodRow, column: Column, reach: float) -> dict[str, Any]:
    """What one cell shows."""
    second = "second" if is_best(table, row, column, place=1) else ""
    return {
        "text": column.cell(row),
        "kind": column.figure if column.figure in ("difference", "paper") else "",
        "rank": "best" if is_best(table, row, column) else second,
        "detail": column.detail(row),
        "interval": drawn_interval(row, reach) if column.figure == "difference" else None,
    }


def drawn_reach(rows: Sequence[MethodRow]) -> float:
    """Half the width of the drawn intervals: a method that went astray must not shrink the rest."""
    ends = sorted(
        max(abs(row.difference.low), abs(row.difference.high))
        for row in rows
        if row.difference and row.difference.low is not None and row.difference.high is not None
    )
    if not ends:
        return 0.0
    return min(ends[-1], 3 * ends[len(ends) // 2])


def drawn_interval(row: MethodRow, reach: float) -> Interval | None:
    """Where it lies in its cell, of which ``reach`` is half."""
    difference = row.difference
    if difference is None or difference.low is None or difference.high is None or not reach:
        return None

    def place(value: float) -> float:
        return round(50 + 46 * max(-1.0, min(1.0, value / reach)), 2)

    low, high = place(difference.low), place(difference.high)
    ends = (("left", difference.low < -reach), ("right", difference.high > reach))
    beyond = " ".join(side for side, goes_on in ends if goes_on)
    return Interval(low, round(high - low, 2), place(difference.value), row.verdict, beyond)


def _legend(table: ReportTable) -> list[dict[str, Any]]:
    """Every method with its colour; the baseline, the best and the trace penalties stand out."""
    ranked = table.ranked(table.compared)
    ours = [row.method for row in table.rows if row.ours]
    wanted = [table.comparison.baseline, *ranked[:2], *ours, *ranked]
    forward = list(dict.fromkeys(wanted))[:FORWARD]
    others = [row.method for row in table.rows if row.method != table.comparison.baseline]
    # Those that stand out first: among them no colour comes twice.
    others.sort(key=lambda method: method not in forward)
    colours = {method: f"c{number % COLOURS}" for number, method in enumerate(others)}
    return [
        {
            "number": number,
            "row": row,
            "colour": colours.get(row.method, "ink"),
            "dashed": row.method in others[COLOURS:],
            "checked": row.method in forward,
        }
        for number, row in enumerate(table.rows)
    ]


def _versions(table: ReportTable) -> list[tuple[str, str]]:
    """Each version, or all of them where the runs differ."""
    found: dict[str, set[str]] = {}
    for run in table.comparison.runs.values():
        for name, version in run.versions.items():
            found.setdefault(name, set()).add(version)
    if table.comparison.version and "seht" not in found:
        found["seht"] = {str(table.comparison.version)}
    return [(name, ", ".join(sorted(versions))) for name, versions in sorted(found.items())]
