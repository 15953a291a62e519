"""What the data decide: what is better or worse, what is best, how many seeds it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from seht.lab.report.rows import MethodRow, Rows
from seht.lab.report.stats import LEVEL, holm, paired, seeds_needed

BETTER, WORSE = "better", "worse"


def judged(rows: Sequence[MethodRow], higher: bool, power: float | None) -> list[MethodRow]:
    """The rows with Holm's p, their verdict against the baseline and the seeds they would need."""
    found = {
        row.method: row.difference.p
        for row in rows
        if row.difference is not None and row.difference.p is not None
    }
    corrected = holm(found)
    made = []
    for row in rows:
        p, difference = corrected.get(row.method), row.difference
        if p is None or difference is None:
            made.append(row)
            continue
        better = (difference.value > 0) == higher
        needed = None
        if power is not None and difference.spread is not None:
            needed = seeds_needed(power, difference.spread, len(corrected))
        verdict = (BETTER if better else WORSE) if p < LEVEL else ""
        made.append(replace(row, p=p, verdict=verdict, needed=needed))
    return made


def leaders(table: Rows) -> list[MethodRow]:
    """The method with the best mean, first, and those that the data do not tell apart from it.

    By paired differences to it and Holm's correction over these; with one seed, all of them.
    """
    ranked = table.ranked(table.epoch, f"test_{table.metric.key}")
    rows = {row.method: row for row in table.rows}
    if not ranked:
        return []
    best, *others = (rows[method] for method in ranked)
    found: dict[str, float] = {}
    for row in others:
        difference = paired(best.values, row.values)
        found[row.method] = 1.0 if difference is None or difference.p is None else difference.p
    corrected = holm(found)
    return [best, *(row for row in others if corrected[row.method] >= LEVEL)]
