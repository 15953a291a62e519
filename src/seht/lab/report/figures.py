"""The figures, as SVG that a page can hold inline and colour itself.

Matplotlib draws with placeholder colours; each becomes a variable of the page's style sheet, so
that one drawing serves light and dark, and a method can be brought forward without a redraw.
"""

from __future__ import annotations

import html
import io
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seht.lab.report.load import DONE, Run
from seht.lab.report.rows import Row, Rows
from seht.measure.page.drawing import SIZE, Panel, coloured, cut_out, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRAME = (0.12, 0.15, 0.86, 0.81)
"""The axes in it (left, bottom, width, height): the same in all, so that they line up."""


@dataclass(frozen=True)
class Curve:
    """A quantity along training, its mean over seeds."""

    epoch: list[float]
    seconds: list[float]
    mean: list[float]
    error: list[float]


def convergence(table: Rows) -> list[Panel]:
    """Loss and accuracy (or perplexity) against epoch, then against wall-clock."""
    last = "valid_perplexity" if table.comparison.text else "valid_top1"
    names = {
        "train_loss": "training loss",
        "valid_loss": "validation loss",
        "valid_top1": "validation accuracy, %",
        "valid_perplexity": "validation perplexity",
    }
    found = {
        key: [curve(table.comparison.of(row.method), key) for row in table.rows]
        for key in ("train_loss", "valid_loss", last)
    }
    panels = []
    for axis, unit in (("epoch", "epoch"), ("seconds", _unit(found)[0])):
        for key, curves in found.items():
            if any(curves):
                draw = _lines(table.rows, curves, axis, key, _unit(found)[1])
                title = f"{_bare(names[key])} against {_AXES[axis]}"
                panels.append(_figure(title, draw, table.rows, names[key], unit))
    return panels


_AXES = {"epoch": "epoch", "seconds": "wall-clock"}


def flatness(table: Rows) -> list[Panel]:
    """The compared metric against the trace, and against the cost."""
    metric = f"test {'perplexity' if table.comparison.text else 'accuracy, %'}"
    panels = []
    # A trace below zero has no place on a logarithmic axis, and a single one calls for no figure.
    traces = {
        row.method: row.trace.value
        for row in table.rows
        if row.trace is not None and math.isfinite(row.trace.value)
    }
    costs = {row.method: row.ratio[0] for row in table.rows if row.ratio is not None}
    totals = {row.method: row.total for row in table.rows if row.total is not None}
    log = all(value > 0 for value in traces.values())
    if len(traces) > 1:
        draw = _dots(table, traces, log=log)
        panels.append(
            _figure(
                f"{_bare(metric)} against flatness",
                draw,
                table.rows,
                metric,
                "trace of the Hessian",
            )
        )
    if len(totals) > 1:
        draw, searched = _dots(table, totals, log=True), "a training and its search, × baseline"
        panels.append(
            _figure(f"{_bare(metric)} against compute", draw, table.rows, metric, searched)
        )
    if len(costs) > 1:
        draw = _dots(table, costs, log=False)
        panels.append(
            _figure(
                f"{_bare(metric)} against cost",
                draw,
                table.rows,
                metric,
                "cost of a step, × baseline",
            )
        )
    return panels


def _bare(name: str) -> str:
    """Without its unit."""
    return name.partition(",")[0].capitalize()


def curve(runs: Sequence[Run], key: str) -> Curve | None:
    """The mean over the runs that are done; ``None`` if they did not record it."""
    columns = [run.curves for run in runs if run.status == DONE and key in run.curves]
    columns = [c for c in columns if any(map(math.isfinite, c[key]))]
    if not columns:
        return None
    steps = list(zip(*(c[key] for c in columns), strict=False))
    return Curve(
        epoch=list(columns[0].get("epoch", range(1, len(steps) + 1)))[: len(steps)],
        seconds=[
            statistics.fmean(seconds)
            for seconds in zip(*(c.get("seconds", []) for c in columns), strict=False)
        ],
        mean=[statistics.fmean(step) for step in steps],
        error=[
            statistics.stdev(step) / math.sqrt(len(step)) if _spread(step) else 0.0
            for step in steps
        ],
    )


def _spread(step: tuple[float, ...]) -> bool:
    return len(step) > 1 and all(map(math.isfinite, step))


def _unit(found: dict[str, list[Curve | None]]) -> tuple[str, float]:
    """The axis of time: its name, and how many seconds its unit has."""
    ends = [c.seconds[-1] for curves in found.values() for c in curves if c and c.seconds]
    longest = max(ends, default=0.0)
    for limit, name, seconds in ((180.0, "seconds", 1.0), (10800.0, "minutes", 60.0)):
        if longest < limit:
            return f"{name} of training", seconds
    return "hours of training", 3600.0


# --- drawing ----------------------------------------------------------------------------------

Draw = Callable[["Axes"], None]


def _lines(
    rows: Sequence[Row], curves: Sequence[Curve | None], axis: str, key: str, unit: float
) -> Draw:
    def draw(axes: Axes) -> None:
        for number, found in enumerate(curves):
            if found is None:
                continue
            x = found.epoch if axis == "epoch" else [second / unit for second in found.seconds]
            x, y, error = _same_length(x, found.mean, found.error)
            if any(error):
                low = [a - b for a, b in zip(y, error, strict=True)]
                high = [a + b for a, b in zip(y, error, strict=True)]
                band = axes.fill_between(x, low, high, color=_colour(number), alpha=0.14, lw=0)
                band.set_gid(f"band-{number}")
            marker = "o" if len(x) == 1 else None
            (line,) = axes.plot(x, y, color=_colour(number), lw=1.6, marker=marker, ms=3.5)
            line.set_gid(f"line-{number}")
            line.set_solid_joinstyle("round")
        values = [v for c in curves if c for v in c.mean if math.isfinite(v)]
        _limits(axes, key, values)

    return draw


def _same_length(*columns: list[float]) -> tuple[list[float], ...]:
    length = min(map(len, columns))
    return tuple(column[:length] for column in columns)


def _limits(axes: Axes, key: str, values: list[float]) -> None:
    """Leave the first epochs out of sight where they would flatten everything after them."""
    if key.endswith("top1"):
        low, high = _quantile(values, 0.2), max(values)
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, min(100.0, high + margin) if high < 100 else 100.4)
        return
    positive = [v for v in values if v > 0]
    if positive and max(positive) > 8 * min(positive):
        axes.set_yscale("log")
    top = _quantile(values, 0.98)
    low = min(positive or values)
    axes.set_ylim(low * 0.9 if low > 0 else None, top * 1.1 if top > 0 else None)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _dots(table: Rows, x: dict[str, float], *, log: bool) -> Draw:
    key = (table.epoch, f"test_{table.metric.key}")

    def draw(axes: Axes) -> None:
        for number, row in enumerate(table.rows):
            y = row.metrics.get(key)
            if row.method not in x or y is None or not math.isfinite(y.value):
                continue
            dot = axes.errorbar(
                [x[row.method]],
                [y.value],
                yerr=[y.error or 0.0],
                color=_colour(number),
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


def _figure(title: str, draw: Draw, rows: Sequence[Row], y: str, x: str) -> Panel:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style(title)):
        canvas = Figure(figsize=SIZE)
        axes = canvas.add_axes(FRAME)
        axes.set_axisbelow(True)
        draw(axes)
        axes.set_xlabel(x)
        _ticks(axes)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return Panel(title, _inline(file.getvalue(), f"{title}: {y} by {x}", rows))


def _ticks(axes: Axes) -> None:
    """Plain numbers, also on logarithmic axes, and a few of them only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            low, high = sorted(axis.get_view_interval())
            decades = math.log10(high / low)
            subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.6 else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs) if decades > 0.5 else MaxNLocator(4))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        else:
            whole = axis is axes.xaxis and axes.get_xlabel() == "epoch"
            axis.set_major_locator(MaxNLocator(5, integer=whole, steps=[1, 2, 2.5, 5, 10]))


def _colour(number: int) -> str:
    return f"#03{number // 256:02x}{number % 256:02x}"


def _inline(svg: str, label: str, rows: Sequence[Row]) -> str:
    """Each method's lines and bands become a group that the page's style sheet can find."""
    svg = cut_out(svg, label)

    def group(found: re.Match[str]) -> str:
        kind, number = found.group(1), int(found.group(2))
        name = html.escape(rows[number].method)
        return f'<g class="{kind} {kind}-{number}"><title>{name}</title>'

    svg = re.sub(r'<g id="(line|band)-(\d+)">', group, svg)
    svg = re.sub(r"#03([0-9a-f]{4})\b", lambda m: f"var(--m{int(m.group(1), 16)})", svg)
    return coloured(svg)
