"""The table's columns, said once for the terminal, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from seht.lab import paper
from seht.lab.report.numbers import interval, measured, plain, significant
from seht.lab.report.rows import MethodRow, Rows
from seht.lab.report.stats import Mean
from seht.lab.robustness import BITS, NOISE

RESULTS, BOUGHT, FLATNESS = "results", "bought", "flatness"


@dataclass(frozen=True)
class Column:
    """One column; it appears where a row has something in it."""

    title: str
    """Over two lines in the terminal, where it has a line break."""
    cell: Callable[[MethodRow], str]
    group: str = RESULTS
    kind: str = ""
    """``difference``, ``paper`` or a metric's ``last test_top1``: what a page may treat apart."""
    detail: Callable[[MethodRow], str] = lambda row: ""
    """More about the figure, where there is room."""
    quoted: Callable[[paper.Row], str] = lambda row: ""
    """What it says of a row that only the paper has."""


def columns(table: Rows) -> list[Column]:
    """All columns that have anything in them."""
    baseline = table.comparison.baseline
    found = [
        Column(title, _metric(epoch, key), kind=f"{epoch} {key}")
        for epoch, key, title in table.shown
    ]
    compared = [f"{epoch} {key}" for epoch, key, _ in table.shown]
    after = f"{table.epoch} test_{table.metric.key}"
    beside = compared.index(after) + 1 if after in compared else 0
    found[beside:beside] = [
        Column(
            f"difference to\n{baseline} [95 %]",
            lambda row: interval(row.difference) + (" *" if row.verdict else ""),
            kind="difference",
        ),
        *(
            Column(f"paper:\n{title}", _theirs(key), kind="paper", quoted=printed(key))
            for key, title in _paper_metrics(table)
        ),
    ]
    found += _bought(table)
    found += [
        Column("n", count, kind="n"),
        Column(f"seeds for\n{table.power or 0:g}", _needed, kind="power"),
        Column("cost\nratio", _ratio, FLATNESS, kind="cost", detail=_spread),
        Column("with\nsearch", _total, FLATNESS, kind="cost"),
        Column("trace", lambda row: measured(row.trace), FLATNESS, kind="trace"),
        Column("largest\neigenvalue", _end("largest", "≥"), FLATNESS, kind="eigenvalue"),
        Column("smallest\neigenvalue", _end("smallest", "≤"), FLATNESS, kind="eigenvalue"),
        Column(
            "curvature\nat the end",
            lambda row: curvature(row.stability),
            FLATNESS,
            kind="stability",
            detail=_equilibria,
        ),
        Column("weight norm", lambda row: measured(row.weight_norm), FLATNESS),
        Column("training loss", lambda row: measured(row.train_loss), FLATNESS),
    ]
    return [
        column
        for column in found
        if any(column.cell(row) for row in table.rows) or any(map(column.quoted, table.quoted))
    ]


def _bought(table: Rows) -> list[Column]:
    """What flatness is for: calibration, and what rounded and disturbed weights are worth."""
    key = f"test_{table.metric.key}"
    titles = {
        "test_loss": "test\nloss",
        "test_ece": "calibration\nerror, %",
        **{f"{key}_{bits}bit": f"at\n{bits} bits" for bits in BITS},
        **{f"{key}_noise{share}": f"with\n{share} % noise" for share in NOISE},
    }
    made = []
    for name, title in titles.items():
        write = measured if name == "test_loss" else plain
        made.append(
            Column(title, _metric(table.epoch, name, write), BOUGHT, f"{table.epoch} {name}")
        )
    return made


def count(row: MethodRow) -> str:
    """The runs behind the means."""
    return str(row.done) if row.done == row.asked else f"{row.done} of {row.asked}"


def _metric(
    epoch: str, key: str, write: Callable[[Mean | None], str] = plain
) -> Callable[[MethodRow], str]:
    return lambda row: write(row.metrics.get((epoch, key)))


def _end(which: str, bound: str) -> Callable[[MethodRow], str]:
    """An end of the spectrum, or what bounds it."""

    def text(row: MethodRow) -> str:
        said = measured(getattr(row, which))
        return f"{bound} {said}" if said and which in row.bounds else said

    return text


CURVATURE = {
    "stable": "upward",
    "unstable": "partly downward",
    "marginal": "partly flat",
    "undecided": "not found",
}
"""What a verdict on stability says about the loss around the end."""


def curvature(verdicts: str | None) -> str:
    """``"marginal (2), unstable (1)"`` as ``"partly flat (2), partly downward (1)"``."""
    words = (verdicts or "").split(", ")
    said = [word.split(" (") for word in words]
    return ", ".join(" (".join([CURVATURE.get(word, word), *count]) for word, *count in said)


def _equilibria(row: MethodRow) -> str:
    if row.equilibria is None:
        return ""
    yes, known = row.equilibria
    if yes in (0, known):
        return "(settled)" if yes else "(still moving)"
    return f"(settled: {yes} of {known})"


def _needed(row: MethodRow) -> str:
    return "" if row.needed is None else f"{row.needed:,}"


def _ratio(row: MethodRow) -> str:
    return "" if row.ratio is None else significant(row.ratio[0])


def _total(row: MethodRow) -> str:
    return "" if row.total is None else significant(row.total)


def _spread(row: MethodRow) -> str:
    if row.ratio is None or row.ratio[1] is None or row.ratio[2] is None:
        return ""
    low, high = significant(row.ratio[1]), significant(row.ratio[2])
    return "" if low == high else f"[{low}, {high}]"


def _paper_metrics(table: Rows) -> list[tuple[str, str]]:
    """The metrics that the paper prints, under our titles."""
    if table.paper is None:
        return []
    titles = {
        "test_top1": "top-1",
        "test_top5": "top-5",
        "valid_perplexity": "valid",
        "test_perplexity": "test",
    }
    return [(key, titles[key]) for key in table.paper.rows[0].figures]


def _theirs(key: str) -> Callable[[MethodRow], str]:
    say = printed(key)
    return lambda row: "" if row.paper is None else say(row.paper)


def printed(key: str) -> Callable[[paper.Row], str]:
    """What the paper prints, marked where it is another publication's."""

    def text(row: paper.Row) -> str:
        value, error = row.figures[key]
        said = f"{value:g}" if error is None else f"{value:.2f} ± {error:.2f}"
        return f"{said} †" if row.quoted else said

    return text
