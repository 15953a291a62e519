"""Cost against variance, one panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from seht.extras import need
from seht.lab.bench.results import CaseResult, RowResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"hessian": "tab:blue", "ggn": "tab:orange", None: "tab:gray"}
_NAMES = {
    "safe": "nested",
    "scalar": "1 probe",
    "lean": "lean",
    "five": "5 probes",
    "d0.01": "D 0.01",
    "d0.05": "D 0.05",
    "quarter": "quarter",
    "s": "SEHT-S",
    "fisher": "Fisher",
}


def require() -> type[Figure]:
    """Matplotlib's ``Figure``, or an error that says where to get it."""
    need("lab", "a plot", "matplotlib")
    from matplotlib.figure import Figure

    return Figure


def draw(results: Sequence[CaseResult], file: str) -> None:
    """Write the plot; its format follows from the file's name."""
    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    figure = require()(figsize=(5 * columns, 4.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(results) :]:
        panel.set_axis_off()
    for panel, result in zip(panels, results, strict=False):
        points = [row for row in result.rows if row.ratio and row.variance and row.variance > 0]
        for row in points:
            panel.plot(row.ratio, row.variance, "o", color=_COLOURS.get(row.curvature, "tab:gray"))
            name = row.key.rpartition("/")[2]
            panel.annotate(
                _NAMES.get(name, name),
                (row.ratio, row.variance),
                # Rows with the same draws lie side by side.
                xytext=(3, -10) if name in ("lean", "quarter") else (4, 3),
                textcoords="offset points",
                fontsize=7,
                color=_COLOURS.get(row.curvature, "tab:gray"),
            )
        panel.set(
            title=result.title, xscale="log", yscale="log", xlabel="time of a step / plain step"
        )
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("{x:g}")
        panel.tick_params(axis="x", which="both", labelsize=7)
        _levels(panel, points)
    panels[0].set_ylabel("variance of the penalty's gradient / squared mean")
    for curvature, name in (("hessian", "tr(H)"), ("ggn", "tr(G)")):
        panels[0].plot([], [], "o", color=_COLOURS[curvature], label=name)
    panels[0].plot([], [], "-", color="0.85", label="equal variance x time")
    panels[0].legend(fontsize=7)
    # By this mark a picture of ours is known, and drawn anew under its name.
    key = "Software" if file.lower().endswith(".png") else "Creator"
    known = file.lower().endswith((".png", ".svg", ".pdf"))
    figure.savefig(file, dpi=150, metadata={key: "seht bench"} if known else None)


def _levels(panel: Axes, points: Sequence[RowResult]) -> None:
    """Lines on which variance times time is the same."""
    if not points:
        return
    times = [row.ratio or 1.0 for row in points]
    left, right = 0.9 * min(times), 1.5 * max(times)
    low, high = panel.get_ylim()
    level = low * left
    while level < high * right:
        panel.plot(
            [left, right], [level / left, level / right], "-", color="0.85", lw=0.8, zorder=0
        )
        level *= 10
    panel.set_xlim(left, right)
    panel.set_ylim(low, high)
