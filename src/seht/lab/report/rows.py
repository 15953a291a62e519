"""From runs to the rows of the table: one method each, in the paper's order."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seht.lab import paper
from seht.lab.methods.parse import read
from seht.lab.report.load import DONE, ComparisonRecord, RunRecord
from seht.lab.report.stats import Difference, Mean, mean, paired


@dataclass(frozen=True)
class Metric:
    """A figure that is compared."""

    key: str
    """Its name in ``result.json``, after ``test_`` or ``valid_``."""
    title: str
    higher: bool
    """Whether more of it is better."""


TOP1 = Metric("top1", "top-1 accuracy, %", True)
TOP5 = Metric("top5", "top-5 accuracy, %", True)
PERPLEXITY = Metric("perplexity", "perplexity", False)
LOSS = Metric("loss", "loss", False)
ENDS = ("largest", "smallest")


@dataclass(frozen=True)
class MethodRow:
    """One method: every figure a mean over its finished runs, ``None`` where there is none."""

    method: str
    parts: list[tuple[str, str]]
    """Its name and options, for each method that it is made of."""
    done: int
    asked: int
    metrics: Mapping[tuple[str, str], Mean]
    """By (``"last"`` or ``"best"``, metric in full)."""
    difference: Difference | None
    """To the baseline; ``None`` for the baseline itself."""
    trace: Mean | None
    weight_norm: Mean | None
    train_loss: Mean | None
    seconds: Mean | None
    ratio: tuple[float, float | None, float | None] | None
    """Cost of a step in the baseline's steps, with what it varied between."""
    searched: int | None = None
    """Trainings that the choice of its setting took, where there was a search."""
    largest: Mean | None = None
    smallest: Mean | None = None
    bounds: frozenset[str] = frozenset()
    """Which of ``largest`` and ``smallest`` is a bound in some run: its search did not converge."""
    stability: str | None = None
    equilibria: tuple[int, int] | None = None
    """Runs that ended in an equilibrium of gradient flow, and runs of which that is known."""
    paper: paper.Row | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    """The compared metric by seed."""
    p: float | None = None
    """Of the difference, after Holm's correction over the table."""
    verdict: str = ""
    """``better`` or ``worse`` than the baseline, by that; empty where it is not decided."""
    needed: int | None = None
    """Seeds that a difference of the asked size takes, from the spread seen."""

    @property
    def total(self) -> float | None:
        """Cost of a training and its search, in trainings of the baseline with its setting."""
        if self.ratio is None or self.searched is None:
            return None
        return self.ratio[0] * (1 + self.searched)

    @property
    def ours(self) -> bool:
        """Whether the row belongs below the paper's rule: a trace penalty of this library."""
        return self.parts[0][0].startswith("seht")


@dataclass(frozen=True)
class Rows:
    """The table."""

    comparison: ComparisonRecord
    rows: list[MethodRow]
    metric: Metric
    epoch: str
    """Whose weights the difference compares: those of the ``last`` epoch or the ``best`` one."""
    shown: list[tuple[str, str, str]]
    """Columns of metrics: (``last`` or ``best``, metric in full, title)."""
    quoted: list[paper.Row]
    """Rows of the paper's table that no run stands for."""
    paper: paper.Table | None
    power: float | None = None
    """The size of a difference whose number of seeds is asked for."""

    @property
    def baseline(self) -> MethodRow:
        """The method that the others are compared with."""
        return next(row for row in self.rows if row.method == self.comparison.baseline)

    def ranked(self, epoch: str, key: str) -> list[str]:
        """The methods by that metric, best first."""
        found = [
            (row.metrics[epoch, key].value, row.method)
            for row in self.rows
            if (epoch, key) in row.metrics
        ]
        finite = [item for item in found if item[0] == item[0]]
        higher = "top1" in key or "top5" in key
        return [method for _, method in sorted(finite, key=lambda item: item[0], reverse=higher)]


def build(comparison: ComparisonRecord, power: float | None = None) -> Rows:
    """Summarise every method.

    Images: the test accuracy after the last epoch, as their schedules end at a learning rate of
    zero. Text: the test perplexity of the weights that were best on the validation text, as is the
    custom where the schedule itself looks at the validation loss. The other one stands beside it.
    ``power`` asks for the number of seeds that a difference of that size takes.
    """
    from seht.lab.report.verdicts import judged

    text = comparison.text
    metric, epoch = (PERPLEXITY, "best") if text else (TOP1, "last")
    baseline = _values(comparison.of(comparison.baseline), epoch, metric)
    table = paper.TABLES.get(str(comparison.recipe.get("paper")))
    rows = []
    for method in comparison.methods:
        rows.append(_row(comparison, method, metric, epoch, baseline, table))
    rows = judged(rows, metric.higher, power)
    # The paper's layout: its own methods at the end, below a rule.
    rows.sort(key=lambda row: row.ours)
    taken = [row.paper for row in rows if row.paper is not None]
    quoted = [row for row in (table.rows if table else []) if row not in taken]
    shown = _shown(comparison, rows)
    return Rows(comparison, rows, metric, epoch, shown, quoted, table, power)


def _shown(comparison: ComparisonRecord, rows: list[MethodRow]) -> list[tuple[str, str, str]]:
    if comparison.text:
        wanted = [
            ("best", "valid_perplexity", "valid\nperplexity"),
            ("best", "test_perplexity", "test\nperplexity"),
            ("last", "test_perplexity", "test, last\nepoch"),
        ]
    else:
        wanted = [
            ("last", "test_top1", "test\naccuracy, %"),
            ("best", "test_top1", "at the\nbest epoch"),
        ]
        if comparison.recipe["data"]["name"] == "cifar100":
            wanted.insert(1, ("last", "test_top5", "test\ntop-5, %"))
            wanted[0] = ("last", "test_top1", "test\ntop-1, %")
    return [column for column in wanted if any(column[:2] in row.metrics for row in rows)]


def _row(
    comparison: ComparisonRecord,
    method: str,
    metric: Metric,
    epoch: str,
    baseline: Mapping[int, float],
    table: paper.Table | None,
) -> MethodRow:
    runs = comparison.of(method)
    done = [run for run in runs if run.status == DONE]
    values = _values(done, epoch, metric)
    found: dict[tuple[str, str], Mean] = {}
    for which in ("last", "best"):
        keys = {key for run in done for key in run.result["metrics"].get(which) or {}}
        for key in sorted(keys):
            summary = _mean(done, "metrics", which, key)
            if summary is not None:
                found[which, key] = summary
    return MethodRow(
        method=method,
        parts=split(method),
        done=len(done),
        asked=len(runs),
        metrics=found,
        difference=None if method == comparison.baseline else paired(values, baseline),
        trace=_trace(done),
        weight_norm=_mean(done, "weight_norm"),
        train_loss=_mean(done, "train_loss"),
        seconds=_mean(done, "seconds"),
        ratio=_ratio(comparison.costs.get(method)),
        searched=comparison.searches.get(method),
        largest=_mean(done, "eigenvalues", "largest"),
        smallest=_mean(done, "eigenvalues", "smallest"),
        bounds=frozenset(end for end in ENDS if any(_bound(run, end) for run in done)),
        stability=_stability(done),
        equilibria=_equilibria(done),
        paper=table.find(options_of(method, comparison.recipe)) if table else None,
        values=values,
    )


def _values(runs: list[RunRecord], epoch: str, metric: Metric) -> dict[int, float]:
    found = {run.seed: run.number("metrics", epoch, f"test_{metric.key}") for run in runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _mean(runs: list[RunRecord], *path: str) -> Mean | None:
    values = (run.number(*path) for run in runs)
    return mean(value for value in values if value is not None)


def _trace(runs: list[RunRecord]) -> Mean | None:
    """Over seeds, which the error of each estimate is a part of; of a single seed, that error."""
    summary = _mean(runs, "trace", "estimate")
    if summary is not None and summary.n == 1:
        errors = [run.number("trace", "stderr") for run in runs]
        return Mean(summary.value, next((e for e in errors if e is not None), None), 1)
    return summary


def _ratio(cost: Mapping[str, Any] | None) -> tuple[float, float | None, float | None] | None:
    if not cost or not isinstance(cost.get("ratio"), (int, float)):
        return None
    low, high = (
        float(cost[key]) if isinstance(cost.get(key), (int, float)) else None
        for key in ("low", "high")
    )
    return float(cost["ratio"]), low, high


def _bound(run: RunRecord, end: str) -> bool:
    """Whether the run has not found this end of the spectrum, to a twentieth of it."""
    found = run.result.get("eigenvalues")
    if not isinstance(found, Mapping) or found.get("converged") is not False:
        return False
    value, residual = run.number("eigenvalues", end), run.number("eigenvalues", f"{end}_residual")
    return value is None or residual is None or residual > abs(value) / 20


def _equilibria(runs: list[RunRecord]) -> tuple[int, int] | None:
    found = [(run.result.get("stability") or {}) for run in runs]
    known = [s["equilibrium"] for s in found if isinstance(s, Mapping) and "equilibrium" in s]
    return (sum(map(bool, known)), len(known)) if known else None


def _stability(runs: list[RunRecord]) -> str | None:
    """The verdicts of the runs, each once, with how many runs share it where they differ."""
    found = []
    for run in runs:
        stability = run.result.get("stability")
        if isinstance(stability, Mapping):
            stability = stability.get("verdict", stability.get("stable"))
        if isinstance(stability, bool):
            stability = "stable" if stability else "not stable"
        if isinstance(stability, str):
            found.append(stability)
    different = sorted(set(found))
    if len(different) < 2:
        return different[0] if different else None
    return ", ".join(f"{verdict} ({found.count(verdict)})" for verdict in different)


# --- a method's text --------------------------------------------------------------------------


def split(method: str) -> list[tuple[str, str]]:
    """``"seht-d(prob=0.05)+mixup"``: ``[("seht-d", "prob=0.05"), ("mixup", "")]``."""
    return [
        (name, ",".join(f"{key}={value}" for key, value in options.items()))
        for name, options in _given(method).items()
    ]


def options_of(method: str, recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options each part runs with, the recipe's settings under those of the text."""
    settings = recipe.get("settings") or {}
    return {
        name: {**settings.get(name, {}), **{key: _value(text) for key, text in options.items()}}
        for name, options in _given(method).items()
    }


def _given(method: str) -> dict[str, dict[str, str]]:
    try:
        return read(method)
    except ValueError:  # a label: of a changed recipe, or of another version
        return {method: {}}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
