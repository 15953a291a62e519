"""The rows of the table: every estimator with every engine and form, and the rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import seht
from seht.lab.bench import runners
from seht.lab.bench.cases import Problem
from seht.lab.bench.runners import Runner

CURVATURES = ("hessian", "ggn")
Options = dict[str, Any]


@dataclass(frozen=True)
class BenchRow:
    """One line: what is run, and what it is compared with."""

    key: str
    label: str
    make: Callable[..., Runner] = field(repr=False)
    """Takes the problem and the penalty's weight."""
    truth: Callable[..., Runner] | None = field(default=None, repr=False)
    """What its gradient is compared with, made as ``make`` does on a float64 copy of the problem;
    rows with the same truth share it.
    """
    curvature: str | None = None
    limit: float | None = None
    """Its cost in plain steps if only the passes counted."""
    slow: bool = False
    """Timed in fewer rounds."""
    essential: bool = False
    """Kept where time is short."""
    same_draws: str | None = None
    """The row with the same random draws, whose variance is measured (itself as a rule)."""
    divide: int = 1
    """How many independent draws of that row this one averages."""

    def runner(self, problem: Problem, weight: float = 1e-6) -> Runner:
        """A runner that is ready for steps; ``ValueError`` if the problem has none."""
        return self.make(problem, weight)


def table() -> list[BenchRow]:
    """Every row, in the order of the report."""
    fisher = runners.FisherStep
    return [
        BenchRow("plain", "plain step", runners.Runner, limit=1.0, essential=True),
        *(row for curvature in CURVATURES for row in _penalties(curvature)),
        BenchRow("sam", "SAM", runners.SamStep, limit=2.0),
        BenchRow("fisher", "one-sample Fisher", fisher, fisher, slow=True, same_draws="fisher"),
    ]


def _penalties(curvature: str) -> list[BenchRow]:
    ggn, key = curvature == "ggn", f"{curvature}/{{}}".format
    one = key("scalar")

    def row(
        name: str, label: str, what: Options, how: Options | None = None, **rest: Any
    ) -> BenchRow:
        """``what`` is estimated determines the reference value; ``how`` it is computed does not."""
        truth = _penalty(curvature=curvature, **what)
        make = _penalty(curvature=curvature, **what, **(how or {}))
        return BenchRow(
            key(name), label, make, truth, curvature, **{"same_draws": key(name), **rest}
        )

    short, scalar, lean = 2.0 if ggn else 3.0, "penalty(closure)", "penalty.backward(closure)"
    five, truth = seht.SehtH(probes=5), _penalty(curvature=curvature)
    nested, fused = "nested autograd", partial(runners.Fused, curvature=curvature)
    plain: Options = {"slow": True, "same_draws": one}
    return [
        BenchRow(key("fused"), f"{nested}, fused operators", fused, truth, curvature, slow=True),
        row("safe", f"{nested}, safe", {}, {"engine": "autograd"}, **plain),
        row("scalar", f"`{scalar}`, SEHT-H, 1 probe", {}, limit=short, essential=True),
        row(
            "lean", f"`{lean}`, SEHT-H, 1 probe", {}, {"lean": True},
            limit=7 / 3 if ggn else 3.0, essential=True, same_draws=one,
        ),
        row(
            "five", "SEHT-H, 5 probes", {"estimator": five},
            limit=6.0 if ggn else 11.0, divide=5, **plain,
        ),
        *(
            row(f"d{p}", f"SEHT-D, p = {p}", {"estimator": seht.SehtD(prob=p, rescale=True)})
            for p in (0.01, 0.05)
        ),
        row(
            "quarter", "`on=` a quarter of the batch", {"quarter": True},
            limit=1.5 if ggn else 1.75,
        ),
        row("s", "SEHT-S, 1 probe", {"estimator": "seht-s"}, limit=short),
    ]  # fmt: skip


@cache
def _penalty(**options: Any) -> Callable[..., Runner]:
    """Makes such runners; for the same options it is the same function, and so the same truth."""
    return lambda problem, weight: runners.Penalty(problem, weight, **options)
