"""The rows of the table: every estimator with every engine and form, and the rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import seht
from seht.estimators import ESTIMATORS
from seht.lab.bench import rivals, runners
from seht.lab.bench.cases import Problem
from seht.lab.bench.runners import SHARP, Runner

CURVATURES = ("hessian", "ggn")


@dataclass(frozen=True)
class Truth:
    """What a row is compared with, run on a float64 copy of the problem."""

    name: str
    """Rows with the same name have the same truth."""
    make: Callable[..., Runner] = field(repr=False)


@dataclass(frozen=True)
class Row:
    """One line: what is run, and what it is compared with."""

    key: str
    label: str
    make: Callable[..., Runner] = field(repr=False)
    """Takes the problem and the penalty's weight."""
    truth: Truth | None = None
    curvature: str | None = None
    limit: float | None = None
    """Its cost if nothing but passes counted, in plain steps."""
    slow: bool = False
    """Timed in fewer rounds."""
    essential: bool = False
    """Kept where time is short."""
    same_draws: str | None = None
    """The row with the same random draws, whose variance is measured (itself as a rule)."""
    divide: int = 1
    """How many independent draws of that row this one averages."""
    weight: float = SHARP
    """For error and variance: a large one, if the gradient is linear in it."""

    def runner(self, problem: Problem, weight: float = 1e-6) -> Runner:
        """Ready for steps; ``ValueError`` if there is no such thing."""
        return self.make(problem, weight)


def table() -> list[Row]:
    """Every row, in the order of the report."""
    rows = [Row("plain", "plain step", runners.Runner, limit=1.0, essential=True)]
    for curvature in CURVATURES:
        rows += _penalties(curvature)
    rows.append(Row("sam", "SAM", rivals.Sam, limit=2.0))
    truth = Truth("fisher", rivals.Fisher)
    rows.append(
        Row("fisher", "one-sample Fisher", rivals.Fisher, truth, slow=True, same_draws="fisher")
    )
    return rows


def _penalties(curvature: str) -> list[Row]:
    short = curvature == "ggn"

    def row(name: str, label: str, **options: Any) -> Row:
        settings = {
            k: options.pop(k)
            for k in ("limit", "slow", "essential", "same_draws", "divide", "weight")
            if k in options
        }
        key = f"{curvature}/{name}"
        what = {k: v for k, v in options.items() if k in ("estimator", "quarter")}
        truth = Truth(f"{curvature} {what}", _penalty(curvature=curvature, **what))
        return Row(
            key,
            label,
            _penalty(curvature=curvature, **options),
            truth,
            curvature,
            **{"same_draws": key, **settings},
        )

    one = f"{curvature}/scalar"
    fused = Row(
        f"{curvature}/fused",
        "nested autograd, fused operators",
        lambda problem, weight: runners.Fused(
            problem, weight, estimator=seht.SehtH(), curvature=curvature
        ),
        Truth(f"{curvature} {{}}", _penalty(curvature=curvature)),
        curvature,
        slow=True,
    )
    rows = [
        fused,
        row("safe", "nested autograd, safe", engine="autograd", slow=True, same_draws=one),
        row(
            "scalar",
            "`penalty(closure)`, SEHT-H, 1 probe",
            limit=2.0 if short else 3.0,
            essential=True,
        ),
        row(
            "lean",
            "`penalty.backward(closure)`, SEHT-H, 1 probe",
            lean=True,
            limit=7 / 3 if short else 3.0,
            essential=True,
            same_draws=one,
        ),
        row(
            "five",
            "SEHT-H, 5 probes",
            estimator=seht.SehtH(probes=5),
            limit=6.0 if short else 11.0,
            slow=True,
            same_draws=one,
            divide=5,
        ),
    ]
    rows += [
        row(
            f"d{prob}",
            f"SEHT-D, p = {prob}",
            estimator=seht.SehtD(prob=prob, rescale=True),
        )
        for prob in (0.01, 0.05)
    ]
    rows.append(
        row(
            "quarter",
            "`on=` a quarter of the batch",
            quarter=True,
            limit=1.5 if short else 1.75,
        )
    )
    if "seht-s" in ESTIMATORS:
        limit = 2.0 if short else 3.0
        rows.append(row("s", "SEHT-S, 1 probe", estimator="seht-s", limit=limit))
    return rows


def _penalty(**options: Any) -> Callable[..., Runner]:
    return lambda problem, weight: runners.Penalty(problem, weight, **options)
