"""The figures, as SVG that a page can hold inline and colour itself.

Matplotlib draws with placeholder colours; each becomes a variable of the page's style sheet, so
that one drawing serves light and dark, and a method can be brought forward without a redraw.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seht.lab.report.load import DONE, RunRecord
from seht.lab.report.rows import MethodRow, ReportTable
from seht.lab.report.stats import mean
from seht.measure.page.drawing import Draw, Panel, band, colour, limits, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRAME = (0.12, 0.15, 0.86, 0.81)
"""The axes in it (left, bottom, width, height): the same in all, so that they line up."""


_PLACES = 200
"""So many pieces has the line of a tuned weight."""


@dataclass(frozen=True)
class Curve:
    """A quantity along training, its mean over seeds."""

    epoch: list[float]
    seconds: list[float]
    mean: list[float]
    error: list[float]


def convergence(table: ReportTable) -> list[Panel]:
    """Loss and accuracy (or perplexity) against epoch, then against wall-clock; tuned weights."""
    last = "valid_perplexity" if table.comparison.text else "valid_top1"
    names = {
        "train_loss": "training loss",
        "valid_loss": "validation loss",
        "valid_top1": "validation accuracy, %",
        "valid_perplexity": "validation perplexity",
        "test_top1": "test accuracy, %",
        "test_perplexity": "test perplexity",
    }
    found = {
        key: [curve(table.comparison.of(row.method), key) for row in table.rows]
        for key in ("train_loss", "valid_loss", last, last.replace("valid", "test"))
    }
    panels = []
    unit, seconds = _unit(found)
    for axis, said, label in (("epoch", "epoch", "epoch"), ("seconds", "wall-clock", unit)):
        for key, curves in found.items():
            if any(curves):
                draw = _lines(curves, axis, key, seconds)
                title = f"{_bare(names[key])} against {said}"
                panels.append(_figure(title, draw, table.rows, names[key], label))
    weights = [tuned_weight(table.comparison.of(row.method)) for row in table.rows]
    if any(weights):
        draw, name = _lines(weights, "epoch", "weight", 1.0), "the tuned weight, before every="
        panels.append(_figure("Tuned weight against epoch", draw, table.rows, name, "epoch"))
    return panels


def flatness(table: ReportTable) -> list[Panel]:
    """The compared metric against the trace, and against the cost."""
    metric = f"test {'perplexity' if table.comparison.text else 'accuracy, %'}"
    panels = []
    # A trace below zero has no place on a logarithmic axis, and a single one calls for no figure.
    traces = {
        row.method: row.figures["trace"].value
        for row in table.rows
        if "trace" in row.figures and math.isfinite(row.figures["trace"].value)
    }
    costs = {row.method: row.ratio[0] for row in table.rows if row.ratio is not None}
    totals = {row.method: row.total for row in table.rows if row.total is not None}
    log = all(value > 0 for value in traces.values())
    for values, what, x, scale in (
        (traces, "flatness", "trace of the Hessian", log),
        (totals, "compute", "a training and its search, × baseline", True),
        (costs, "cost", "cost of a step, × baseline", False),
    ):
        if len(values) > 1:
            draw, title = _dots(table, values, log=scale), f"{_bare(metric)} against {what}"
            panels.append(_figure(title, draw, table.rows, metric, x))
    return panels


def _bare(name: str) -> str:
    """Without its unit."""
    return name.partition(",")[0].capitalize()


def curve(runs: Sequence[RunRecord], key: str) -> Curve | None:
    """The mean over the runs that are done; ``None`` if they did not record it."""
    columns = [run.curves for run in runs if run.status == DONE and key in run.curves]
    columns = [c for c in columns if any(map(math.isfinite, c[key]))]
    if not columns:
        return None
    steps, seconds = (list(zip(*(c[k] for c in columns), strict=False)) for k in (key, "seconds"))
    return Curve(
        epoch=columns[0]["epoch"][: len(steps)],
        seconds=list(map(statistics.fmean, seconds)),
        mean=list(map(statistics.fmean, steps)),
        error=list(map(_error, steps)),
    )


def _error(step: tuple[float, ...]) -> float:
    found = mean(step)
    return (found and found.error) or 0.0


def tuned_weight(runs: Sequence[RunRecord]) -> Curve | None:
    """The way of a tuned weight, where a row has one: its geometric mean over seeds."""
    found = [run for run in runs if run.status == DONE and run.path is not None]
    paths = [run.path for run in found if run.path is not None]
    if not paths:
        return None
    first = min(path.positions[0] for path in paths)
    places = [first + (1 - first) * k / _PLACES for k in range(_PLACES + 1)]
    steps = [tuple(path.at(place) for path in paths) for place in places]
    epochs = found[0].number("epochs") or 1.0
    middle = list(map(statistics.geometric_mean, steps))
    return Curve([epochs * place for place in places], [], middle, list(map(_error, steps)))


def _unit(found: dict[str, list[Curve | None]]) -> tuple[str, float]:
    """The axis of time: its name, and how many seconds its unit has."""
    ends = [c.seconds[-1] for curves in found.values() for c in curves if c and c.seconds]
    longest = max(ends, default=0.0)
    for limit, name, seconds in ((180.0, "seconds", 1.0), (10800.0, "minutes", 60.0)):
        if longest < limit:
            return f"{name} of training", seconds
    return "hours of training", 3600.0


# --- drawing ----------------------------------------------------------------------------------


def _lines(curves: Sequence[Curve | None], axis: str, key: str, unit: float) -> Draw:
    def draw(axes: Axes) -> None:
        for number, found in enumerate(curves):
            if found is None:
                continue
            x = found.epoch if axis == "epoch" else [second / unit for second in found.seconds]
            length = min(map(len, (x, found.mean)))
            x, y, error = x[:length], found.mean[:length], found.error[:length]
            if any(error):
                shade = band(axes, x, y, error, colour(number))
                if shade is not None:
                    shade.set_gid(f"band-{number}")
            marker = "o" if len(x) == 1 else None
            (line,) = axes.plot(x, y, color=colour(number), lw=1.6, marker=marker, ms=3.5)
            line.set_gid(f"line-{number}")
            line.set_solid_joinstyle("round")
        steps = [pair for c in curves if c for pair in zip(c.mean, c.error, strict=True)]
        steps = [pair for pair in steps if all(map(math.isfinite, pair))]
        _limits(axes, key, [mean for mean, _ in steps], [mean + error for mean, error in steps])

    return draw


def _limits(axes: Axes, key: str, values: list[float], tops: list[float]) -> None:
    """Leave the first epochs out of sight where they would flatten everything after them.

    ``tops``: where the bands around the values end, which is not to be cut off.
    """
    if key.endswith("top1"):
        low, high = limits(values, 0.2)[1], min(100.0, max(tops))
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, min(100.0, high + margin) if high < 100 else 100.4)
        return
    positive = [v for v in values if v > 0]
    if positive and max(positive) > 8 * min(positive):
        axes.set_yscale("log")
    top = max(tops) if key == "weight" else limits(values, 0.98)[1]
    low = min(positive or values)
    axes.set_ylim(low * 0.9 if low > 0 else None, top * 1.1 if top > 0 else None)


def _dots(table: ReportTable, x: dict[str, float], *, log: bool) -> Draw:
    def draw(axes: Axes) -> None:
        for number, row in enumerate(table.rows):
            y = row.figures.get(table.compared)
            if row.method not in x or y is None or not math.isfinite(y.value):
                continue
            dot = axes.errorbar(
                [x[row.method]],
                [y.value],
                yerr=[y.error or 0.0],
                color=colour(number),
                fmt="o",
                ms=5.5,
                lw=1.4,
            )
            for part in (dot.lines[0], *dot.lines[2]):
                part.set_gid(f"line-{number}")
        if log:
            axes.set_xscale("log")
        axes.margins(x=0.08, y=0.1)

    return draw


def _figure(title: str, draw: Draw, rows: Sequence[MethodRow], y: str, x: str) -> Panel:
    names, label = [row.method for row in rows], f"{title}: {y} by {x}"
    return panel(title, draw, x=x, frame=FRAME, label=label, names=names, palette="m")
