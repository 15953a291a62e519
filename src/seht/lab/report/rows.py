"""From runs to the rows of the table: one method each, in the paper's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seht.lab import paper
from seht.lab.fields import literal
from seht.lab.methods.parse import read
from seht.lab.report.load import DONE, ComparisonRecord, RunRecord
from seht.lab.report.stats import LEVEL, Difference, Mean, holm, mean, paired, seeds_needed

BETTER, WORSE = "better", "worse"
ENDS = ("largest", "smallest")


@dataclass(frozen=True)
class MethodRow:
    """One method: every figure a mean over its finished runs."""

    method: str
    parts: list[tuple[str, str]]
    """Its name and options, for each method that it is made of."""
    done: int
    asked: int
    figures: Mapping[str, Mean]
    """By their names in ``table.csv``: ``last_test_top1``, ``trace``, ``seconds`` ..."""
    difference: Difference | None
    """The difference to the baseline; ``None`` for the baseline itself."""
    ratio: tuple[float, float | None, float | None] | None
    """Cost of a step in the baseline's steps, with what it varied between."""
    searched: int | None = None
    """Trainings that the choice of its setting took, where there was a search."""
    bounds: frozenset[str] = frozenset()
    """Which of :data:`ENDS` is a bound in some run: its search did not converge."""
    stability: str | None = None
    equilibria: tuple[int, int] | None = None
    """How many runs ended in an equilibrium of gradient flow, and of how many we know whether."""
    paper: paper.PaperRow | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    """The compared metric by seed."""
    p: float | None = None
    """The difference's p after Holm's correction over the table."""
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
        return any(name.startswith("seht") for name, *_ in self.parts)


@dataclass(frozen=True)
class ReportTable:
    """The table."""

    comparison: ComparisonRecord
    rows: list[MethodRow]
    compared: str
    """The figure of the difference, ``last_test_top1`` or ``best_test_perplexity``."""
    quoted: list[paper.PaperRow]
    """Rows of the paper's table that no run stands for."""
    paper: paper.Table | None
    power: float | None = None
    """The size of a difference whose number of seeds is asked for."""

    def ranked(self, figure: str) -> list[str]:
        """The methods by that figure, best first; none where it is no metric."""
        if not figure.startswith(("last_", "best_")):
            return []
        found = [(row.figures[figure].value, row) for row in self.rows if figure in row.figures]
        finite = [item for item in found if item[0] == item[0]]
        higher = "top1" in figure or "top5" in figure
        finite.sort(key=lambda item: item[0], reverse=higher)
        return [row.method for _, row in finite]

    def leaders(self) -> list[MethodRow]:
        """The method with the best mean, first, and those that the data do not tell apart from it.

        By paired differences to it and Holm's correction over these; with one seed, all of them.
        """
        rows = {row.method: row for row in self.rows}
        ranked = [rows[method] for method in self.ranked(self.compared)]
        found: dict[str, float] = {}
        for row in ranked[1:]:
            difference = paired(ranked[0].values, row.values)
            found[row.method] = 1.0 if difference is None or difference.p is None else difference.p
        corrected = holm(found)
        return [*ranked[:1], *(row for row in ranked[1:] if corrected[row.method] >= LEVEL)]


def build(comparison: ComparisonRecord, power: float | None = None) -> ReportTable:
    """Summarise every method.

    Images: the test accuracy after the last epoch, as their schedules end at a learning rate of
    zero. Text: the test perplexity of the weights that were best on the validation text, as is the
    custom where the schedule itself looks at the validation loss. The other one stands beside it.
    ``power`` asks for the number of seeds that a difference of that size takes.
    """
    which, key = ("best", "test_perplexity") if comparison.text else ("last", "test_top1")
    values: dict[str, dict[int, float]] = {}
    for method in comparison.methods:
        done = [run for run in comparison.of(method) if run.status == DONE]
        found = {run.seed: run.number("metrics", which, key) for run in done}
        values[method] = {seed: value for seed, value in found.items() if value is not None}
    table = paper.TABLES.get(str(comparison.recipe.get("paper")))
    rows = [_row(comparison, method, values, table) for method in comparison.methods]
    rows = _judged(rows, not comparison.text, power)
    # The paper's layout: its own methods at the end, below a rule.
    rows.sort(key=lambda row: row.ours)
    taken = [row.paper for row in rows if row.paper is not None]
    quoted = [row for row in (table.rows if table else []) if row not in taken]
    return ReportTable(comparison, rows, f"{which}_{key}", quoted, table, power)


def _judged(rows: Sequence[MethodRow], higher: bool, power: float | None) -> list[MethodRow]:
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


def _row(
    comparison: ComparisonRecord,
    method: str,
    values: Mapping[str, Mapping[int, float]],
    table: paper.Table | None,
) -> MethodRow:
    runs = comparison.of(method)
    done = [run for run in runs if run.status == DONE]
    baseline = comparison.baseline
    return MethodRow(
        method=method,
        parts=split(method),
        done=len(done),
        asked=len(runs),
        figures=_figures(done),
        difference=None if method == baseline else paired(values[method], values[baseline]),
        ratio=_ratio(comparison.costs.get(method)),
        searched=comparison.searches.get(method),
        bounds=frozenset(end for end in ENDS if any(_bound(run, end) for run in done)),
        stability=_stability(done),
        equilibria=_equilibria(done),
        paper=table.find(options_of(method, comparison.recipe)) if table else None,
        values=values[method],
    )


def _figures(runs: Sequence[RunRecord]) -> dict[str, Mean]:
    """The means over the runs, in the order of ``table.csv``."""
    paths: dict[str, tuple[str, ...]] = {}
    for which in ("last", "best"):
        keys = {key for run in runs for key in run.result["metrics"].get(which) or {}}
        paths |= {f"{which}_{key}": ("metrics", which, key) for key in sorted(keys)}
    paths["trace"] = ("trace", "estimate")
    paths |= {f"{end}_eigenvalue": ("eigenvalues", end) for end in ENDS}
    paths |= {name: (name,) for name in ("weight_norm", "train_loss", "seconds")}
    found = {}
    for name, path in paths.items():
        summary = mean(v for v in (run.number(*path) for run in runs) if v is not None)
        if summary is not None and summary.n == 1 and name == "trace":  # the estimate's own error
            errors = [run.number("trace", "stderr") for run in runs]
            summary = replace(summary, error=next((e for e in errors if e is not None), None))
        if summary is not None:
            found[name] = summary
    return found


def _ratio(cost: Mapping[str, Any] | None) -> tuple[float, float | None, float | None] | None:
    return (float(cost["ratio"]), cost.get("low"), cost.get("high")) if cost else None


def _bound(run: RunRecord, end: str) -> bool:
    """Whether the run has not found this end of the spectrum, to a twentieth of it."""
    if (run.result.get("eigenvalues") or {}).get("converged") is not False:
        return False
    value, residual = run.number("eigenvalues", end), run.number("eigenvalues", f"{end}_residual")
    return value is None or residual is None or residual > abs(value) / 20


def _equilibria(runs: list[RunRecord]) -> tuple[int, int] | None:
    found = [(run.result.get("stability") or {}) for run in runs]
    known = [s["equilibrium"] for s in found if "equilibrium" in s]
    return (sum(map(bool, known)), len(known)) if known else None


def _stability(runs: list[RunRecord]) -> str | None:
    """The verdicts of the runs, each once, with how many runs share it where they differ."""
    records = [run.result.get("stability") for run in runs]
    said = [s.get("verdict", s.get("stable")) for s in records if s]
    found = [{True: "stable", False: "not stable"}.get(one, one) for one in said]
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
        name: {**settings.get(name, {}), **{key: literal(text) for key, text in options.items()}}
        for name, options in _given(method).items()
    }


def _given(method: str) -> dict[str, dict[str, str]]:
    try:
        return read(method)
    except ValueError:  # a label: of a changed recipe, or of another version
        return {method: {}}
