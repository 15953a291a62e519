"""The settings that a search tries: the paper's grids on its recipes, one budget elsewhere.

A grid is fair if every method may try as much as any other. So each has seven values of the option
that matters most for it, over the range in which the best ones have been seen; ``--budget`` takes
fewer of them, evenly. Early stopping makes its choice within a run and needs no search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from seht.lab.config import Recipe

BUDGET = 7
"""The default number of candidates of a row."""

WEIGHTS = (1e-4, 1e-3, 1e-2, 1e-1)
FINE = (1e-3, 5e-3, 1e-2, 5e-2, 1e-1)
PAPER: dict[str, dict[str, dict[str, tuple[Any, ...]]]] = {
    # Section 4, by task: the weight, and for images SEHT-D's maxIter and p; SEHT-S as
    # SEHT-H. For CIFAR-100 it names one grid of weights for all, and nothing else.
    "image": {
        "seht-h": {"weight": WEIGHTS},
        "seht-d": {"weight": WEIGHTS, "probes": (1, 5, 10), "prob": (0.01, 0.05)},
        "seht-s": {"weight": WEIGHTS},
        "confidence-penalty": {"weight": FINE},
        "label-smoothing": {"weight": FINE},
    },
    "cifar100": {
        name: {"weight": WEIGHTS}
        for name in ("seht-h", "seht-d", "seht-s", "confidence-penalty", "label-smoothing")
    },
    "text": {
        "seht-h": {"weight": FINE},
        "seht-d": {"weight": FINE},
        "seht-s": {"weight": FINE},
        "confidence-penalty": {"weight": FINE},
        "label-smoothing": {"weight": FINE},
    },
}
"""The paper's."""
_HALF_DECADES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # p / (1 - p) about doubles from one to the next
FAIR: dict[str, dict[str, tuple[Any, ...]]] = {
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


def grid_of(recipe: Recipe) -> tuple[dict[str, dict[str, tuple[Any, ...]]], int | None]:
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
