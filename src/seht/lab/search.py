"""``--grid``: the setting of each method that is best on the validation split.

A grid is fair if every method may try as much as any other. So on recipes that are not the paper's
each has seven values of the option that matters most for it, over the range in which the best ones
have been seen; ``--budget`` takes fewer of them, evenly. Early stopping chooses within a run and
needs no search.

Best is the highest mean validation accuracy and, among equals, the lowest loss; text: the lowest
loss. Candidates train on the same recipe, with seeds of their own, and never see the test set. The
runs are kept under ``grid/`` and the choices in ``grid.json``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from seht.lab import refit
from seht.lab.config import Recipe
from seht.lab.methods.parse import read, written
from seht.lab.records import Result, RunError, write_json
from seht.lab.schedulers import Scheduler

if TYPE_CHECKING:
    from seht.lab.compare import Comparison, Entry, Say

FIRST_SEED = 1_000_000
"""The first seed of a search; what it chooses is judged with other seeds."""
BEST = "best"
"""``weight-decay(weight=best)+sam``: on top of the weight decay that the search has chosen."""
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
    """The alternatives in the text, or else the grid of its methods.

    No more than ``budget`` of a grid; more alternatives than that are refused.
    """
    given = expand(text)
    if len(given) > 1:
        if budget is not None and len(given) > budget:
            raise ValueError(
                f"{text} has {len(given)} alternatives and --budget is {budget}; leave some out"
            )
        return [one.replace(f"weight-decay(weight={BEST})", "weight-decay") for one in given]
    grid, usual = grid_of(recipe)
    rows = []
    for name, own in read(text).items():
        choices = {**grid.get(name, {}), **{key: (value,) for key, value in own.items()}}
        if name == "weight-decay" and own.get("weight") == BEST:
            choices = {}  # filled in when it is known
        rows.append(
            [
                written(name, dict(zip(choices, values, strict=True)))
                for values in itertools.product(*choices.values())
            ]
        )
    return ["+".join(parts) for parts in thinned(rows, budget or usual)]


def check_search(comparison: Comparison, seeds: int) -> None:
    """Raise if nothing can be chosen on this recipe, or only with the seeds that judge."""
    if comparison.recipe.task != "text" and not comparison.recipe.data.validation:
        raise RunError(
            f"--grid needs a validation split, and {comparison.recipe.name} has none; hold some "
            "training examples out with --data.validation"
        )
    if set(range(FIRST_SEED, FIRST_SEED + seeds)) & set(comparison.seeds):
        raise RunError(
            f"seeds from {FIRST_SEED} on are those of the search, and may not judge; choose a "
            "smaller --first-seed"
        )


def best(
    comparison: Comparison,
    grid: Sequence[Sequence[Entry]],
    seeds: int,
    scheduler: Scheduler,
    say: Say,
) -> list[Entry]:
    """One entry for each list of candidates.

    Rows on top of the best weight decay are searched when that one is known.
    """
    chosen = range(FIRST_SEED, FIRST_SEED + seeds)
    found = _Search(comparison, chosen, scheduler, say)
    winners = {i: found.winner(row) for i, row in found.all(grid, over_decay=False)}
    decay = next((w for w in winners.values() if [*w.method.parts] == ["weight-decay"]), None)
    weight = None if decay is None else decay.method.parts["weight-decay"].get("weight")
    before = 0 if decay is None else found.runs[decay.name]
    later = [[entry.with_decay(weight) for entry in row] for row in grid]
    winners |= {i: found.winner(row, before) for i, row in found.all(later, over_decay=True)}
    write_json(
        comparison.out / "grid.json",
        {
            "about": (
                "score: mean validation top-1, then minus the mean validation loss, on labels as "
                "noisy as the training ones; runs: trainings that the choice of a method took; "
                "edges: options whose smallest or largest candidate was chosen"
            ),
            "seeds": list(chosen),
            "runs": found.runs,
            "edges": found.edges,
            "candidates": found.table,
        },
    )
    return list({winners[i].slug: winners[i] for i in range(len(grid))}.values())


class _Search:
    """The runs of a search, and what was chosen."""

    def __init__(
        self, comparison: Comparison, seeds: Sequence[int], scheduler: Scheduler, say: Say
    ) -> None:
        self.comparison, self.seeds, self.scheduler, self.say = comparison, seeds, scheduler, say
        self.table: list[dict[str, Any]] = []
        self.runs: dict[str, int] = {}
        self.edges: dict[str, str] = {}
        self.results: dict[tuple[str, int], Result] = {}

    def all(
        self, grid: Sequence[Sequence[Entry]], over_decay: bool
    ) -> list[tuple[int, Sequence[Entry]]]:
        """Run the candidates of these rows; the rows with their places."""
        from seht.lab.compare import run

        rows = [(i, row) for i, row in enumerate(grid) if row[0].over_decay == over_decay]
        asked = [(e, seed) for _, row in rows if len(row) > 1 for e in row for seed in self.seeds]
        trials = [self.comparison.trial(entry, seed, folder="grid") for entry, seed in asked]
        if trials:
            self.say(f"searching {len(trials)} runs on the validation split")
        keys = [(entry.slug, seed) for entry, seed in asked]
        self.results |= dict(zip(keys, run(trials, self.scheduler, self.say), strict=True))
        return rows

    def winner(self, row: Sequence[Entry], before: int = 0) -> Entry:
        """The best of a row, written down; the runs ``before`` it are part of its price."""
        if len(row) == 1:
            (best,) = row
        else:
            scores = {
                e.slug: score([self.results[e.slug, seed] for seed in self.seeds]) for e in row
            }
            best = max(row, key=lambda entry: scores[entry.slug])
            self.table += [
                {
                    "method": entry.name,
                    "chosen": entry is best and scores[best.slug] != FAILED,
                    "score": None if scores[entry.slug] == FAILED else list(scores[entry.slug]),
                }
                for entry in row
            ]
            said = f"chosen: {best.name}"
            if scores[best.slug] == FAILED:
                said = f"all {len(row)} candidates failed: {best.name} is judged, give it others"
            elif option := at_edge(best, row):
                self.edges[best.name] = option
                said += f", whose {option} is at the edge of its candidates: better may lie beyond"
            self.say(said)
        own = len(row) * len(self.seeds) if len(row) > 1 else 0
        tuned = self.comparison.refit and bool(refit.tuned(best))  # trained with held-out examples
        self.runs[best.name] = before + own + tuned
        return best


def at_edge(best: Entry, row: Sequence[Entry]) -> str | None:
    """The option whose smallest or largest candidate has won, of three or more."""
    for name, options in best.method.parts.items():
        for option, value in options.items():
            tried = {entry.method.parts[name].get(option) for entry in row}
            numbers = sorted(v for v in tried if isinstance(v, (int, float)))
            if len(numbers) == len(tried) > 2 and value in (numbers[0], numbers[-1]):
                return option
    return None


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


# --- the settings that are tried --------------------------------------------------------------

BUDGET = 7
"""The default number of candidates of a row."""

Grid = dict[str, dict[str, tuple[Any, ...]]]
"""The values to try, by method and option."""
WEIGHTS: dict[str, tuple[Any, ...]] = {"weight": (1e-4, 1e-3, 1e-2, 1e-1)}
FINE: dict[str, tuple[Any, ...]] = {"weight": (1e-3, 5e-3, 1e-2, 5e-2, 1e-1)}
_TRACES, _LOSSES = ("seht-h", "seht-d", "seht-s"), ("confidence-penalty", "label-smoothing")
PAPER: dict[str, Grid] = {
    # Section 4, by task: the weight, and for images SEHT-D's maxIter and p; SEHT-S as
    # SEHT-H. For CIFAR-100 it names one grid of weights for all, and nothing else.
    "image": {
        **dict.fromkeys(_TRACES, WEIGHTS),
        **dict.fromkeys(_LOSSES, FINE),
        "seht-d": {**WEIGHTS, "probes": (1, 5, 10), "prob": (0.01, 0.05)},
    },
    "cifar100": dict.fromkeys((*_TRACES, *_LOSSES), WEIGHTS),
    "text": dict.fromkeys((*_TRACES, *_LOSSES), FINE),
}
"""The paper's."""
_HALF_DECADES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # p / (1 - p) about doubles from one to the next
FAIR: Grid = {
    "weight-decay": {"weight": (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)},
    "linbreg": {"weight": _HALF_DECADES},
    "jacobian": {"weight": _HALF_DECADES},
    "dropblock": {"keep": (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)},
    "confidence-penalty": {"weight": (0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0)},
    "label-smoothing": {"eps": _SHARES},
    "mixup": {"alpha": (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)},
    "dropout": {"rate": _SHARES},
    "nontarget-uniform": {"weight": _HALF_DECADES},
    "feature-redundancy": {"weight": _HALF_DECADES},
    "fisher": {"weight": _HALF_DECADES},
    "nso": {"sigma": (3e-3, 6e-3, 1e-2, 2e-2, 3e-2, 6e-2, 1e-1)},
    "htr-full": {"weight": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)},
    "htr-middle": {"weight": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)},
    "seht-h": {"weight": _HALF_DECADES},
    "seht-s": {"weight": _HALF_DECADES},
    # Its estimate is 1 / 200 of the trace at p = 0.05.
    "seht-d": {"weight": (3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0, 30.0)},
    "sam": {"rho": (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)},
    "asam": {"rho": (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0)},
    "lookahead": {"alpha": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
    "ema": {"decay": (0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)},
}
"""Seven values each."""


def grid_of(recipe: Recipe) -> tuple[Grid, int | None]:
    """The options to try, by method, and how many candidates a row may have."""
    experiment = recipe.name.removesuffix("-small")
    if experiment in ("cifar10", "cifar100", "wikitext2-lstm", "wikitext2-gru"):
        return PAPER.get(recipe.data.name, PAPER[recipe.task]), None
    return FAIR, BUDGET


def thinned(grids: Sequence[Sequence[str]], budget: int | None) -> list[tuple[str, ...]]:
    """At most ``budget`` of all combinations, spread over each of the grids."""
    every = list(itertools.product(*grids))
    if budget is None or len(every) <= budget:
        return every
    if budget == 1:
        return [every[len(every) // 2]]
    # As on a Latin square: each grid from end to end, and the others in another order beside it.
    steps = [step for step in range(1, 2 * budget + len(grids)) if math.gcd(step, budget) == 1]
    chosen = {
        tuple(
            grid[round((k * step % budget) * (len(grid) - 1) / (budget - 1))]
            for grid, step in zip(grids, steps, strict=False)
        )
        for k in range(budget)
    }
    rest = [combination for combination in every if combination not in chosen]
    chosen.update(rest[:: max(1, len(rest) // budget)][: budget - len(chosen)])
    return [combination for combination in every if combination in chosen]
