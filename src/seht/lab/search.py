"""``--grid``: the setting of each method that is best on the validation split.

Best is the highest mean validation accuracy and, among equals, the lowest loss; text: the lowest
loss. Candidates train on the same recipe, with seeds of their own, and never see the test set. The
runs are kept under ``grid/`` and the choices in ``grid.json``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seht.lab.config import Recipe
from seht.lab.grids import grid_of, thinned
from seht.lab.methods.parse import read, written
from seht.lab.records import Result, RunError, write_json
from seht.lab.schedulers import Scheduler

if TYPE_CHECKING:
    from seht.lab.compare import Comparison, Entry, Say

FIRST_SEED = 1_000_000
"""The search has seeds of its own: what it has chosen is judged by others."""
_VALUE = re.compile(r"=([^,()=]*\|[^,()=]*)")


def expand(text: str) -> list[str]:
    """``seht-h(weight=1e-3|1e-2)`` as two texts; the last alternative changes fastest."""
    pieces = _VALUE.split(text)  # text, alternatives, text, ...
    choices = [
        ["=" + value.strip() for value in piece.split("|")] if i % 2 else [piece]
        for i, piece in enumerate(pieces)
    ]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def candidates(text: str, recipe: Recipe, budget: int | None = None) -> list[str]:
    """The alternatives in the text, or else the grid of its methods: :mod:`seht.lab.grids`.

    No more than ``budget`` of a grid; more alternatives than that are refused.
    """
    given = expand(text)
    if len(given) > 1:
        if budget is not None and len(given) > budget:
            raise ValueError(
                f"{text} has {len(given)} alternatives and --budget is {budget}; leave some out"
            )
        return given
    grid, usual = grid_of(recipe)
    rows = []
    for name, own in read(text).items():
        choices = {**grid.get(name, {}), **{key: (value,) for key, value in own.items()}}
        rows.append(
            [
                written(name, dict(zip(choices, values, strict=True)))
                for values in itertools.product(*choices.values())
            ]
        )
    return ["+".join(parts) for parts in thinned(rows, budget or usual)]


def best(
    comparison: Comparison,
    grid: Sequence[Sequence[Entry]],
    seeds: int,
    scheduler: Scheduler,
    say: Say,
) -> list[Entry]:
    """One entry for each list of candidates."""
    from seht.lab.compare import run

    if comparison.recipe.task != "text" and not comparison.recipe.data.validation:
        raise RunError(
            f"--grid needs a validation split, and {comparison.recipe.name} has none; hold some "
            "training examples out with --data.validation 500"
        )
    chosen = range(FIRST_SEED, FIRST_SEED + seeds)
    if set(chosen) & set(comparison.seeds):
        raise RunError(
            f"seeds from {FIRST_SEED} on are those of the search, and may not judge; choose a "
            "smaller --first-seed"
        )
    asked = [(entry, seed) for row in grid if len(row) > 1 for entry in row for seed in chosen]
    keys = [(entry.slug, seed) for entry, seed in asked]
    trials = [comparison.trial(entry, seed, test=False) for entry, seed in asked]
    say(f"searching {len(trials)} runs on the validation split")
    results = dict(zip(keys, run(trials, scheduler, say), strict=True))
    winners, table = [], []
    for row in grid:
        if len(row) > 1:
            scores = {e.slug: score([results[e.slug, seed] for seed in chosen]) for e in row}
            winner = max(row, key=lambda entry: scores[entry.slug])
            table += [
                {
                    "method": entry.name,
                    "chosen": entry is winner,
                    "score": None if scores[entry.slug] == FAILED else list(scores[entry.slug]),
                }
                for entry in row
            ]
            say(f"chosen: {winner.name}")
        else:
            (winner,) = row
        winners.append(winner)
    runs = {
        winner.name: len(row) * seeds if len(row) > 1 else 0
        for row, winner in zip(grid, winners, strict=True)
    }
    write(comparison.out, table, chosen, runs)
    return winners


FAILED = (float("-inf"), float("-inf"))


def score(results: Sequence[Result]) -> tuple[float, float]:
    """Mean validation accuracy, then minus the loss; text: minus the loss. A failed run loses.

    Of the weights that the report compares: the last ones, of text those of the best epoch.
    """
    if not all(result.done for result in results):
        return FAILED
    text = "valid_top1" not in results[0].metrics["last"]
    found = [result.metrics["best" if text else "last"] for result in results]
    top1 = sum(metrics.get("valid_top1", 0.0) for metrics in found) / len(found)
    # A record that has lost its loss loses the comparison, too.
    return top1, -sum(metrics.get("valid_loss", math.inf) for metrics in found) / len(found)


def write(
    directory: Path, table: list[dict[str, Any]], seeds: Sequence[int], runs: dict[str, int]
) -> None:
    """``grid.json``."""
    write_json(
        directory / "grid.json",
        {
            "about": (
                "score: mean validation top-1, then minus the mean validation loss, on labels as "
                "noisy as the training ones; runs: trainings that the choice of a method took"
            ),
            "seeds": list(seeds),
            "runs": runs,
            "candidates": table,
        },
    )
