"""Drawings as SVG that a page holds inline and colours itself.

Matplotlib draws with placeholder colours, each of which becomes a variable of the page's style
sheet: one drawing serves light and dark.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID, FAINT = "#010101", "#020202", "#020203"
SIZE = (5.0, 3.3)
"""Inches of 72 points: drawn at the width of a phone, so that text has the size it was given."""

Draw = Callable[["Axes"], None]


@dataclass(frozen=True)
class Panel:
    """One figure."""

    title: str
    svg: str


def colour(number: int) -> str:
    """The placeholder for a model's colour."""
    return f"#0300{number % 10:02x}"


def style(title: str) -> Any:
    """Matplotlib's settings for a drawing in a page (whose keys it types one by one)."""
    return {
        "svg.fonttype": "none",  # text stays text: selectable, and in the page's font
        "svg.hashsalt": title,
        "font.size": 10.5,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "axes.unicode_minus": True,
    }


def panel(
    title: str,
    draw: Draw,
    *,
    x: str = "",
    y: str = "",
    size: tuple[float, float] = SIZE,
) -> Panel:
    """Run the drawing and cut it out."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style(title)):
        canvas = Figure(figsize=size, layout="constrained")
        axes = canvas.subplots()
        axes.set_axisbelow(True)
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _ticks(axes)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return Panel(title, _inline(file.getvalue(), title))


def limits(values: Sequence[float], cut: float = 1.0) -> tuple[float, float]:
    """Low and high of what is finite, the highest share left out."""
    finite = sorted(v for v in values if math.isfinite(v))
    if not finite:
        return 0.0, 1.0
    return finite[0], finite[min(len(finite) - 1, int(cut * len(finite)))]


def _ticks(axes: Axes) -> None:
    """Plain numbers, also on logarithmic axes, and a few of them only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        elif not getattr(axis, "keep_ticks", False) and scale == "linear":
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def _inline(svg: str, label: str) -> str:
    svg = cut_out(svg, label)
    svg = re.sub(r"#0300([0-9a-f]{2})\b", lambda m: f"var(--c{int(m.group(1), 16)})", svg)
    return coloured(svg)


def cut_out(svg: str, label: str) -> str:
    """The drawing alone, out of Matplotlib's file, with a name for those who cannot see it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    # A style inside an inline drawing would hold for the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    head = f'<svg {box.group()} role="img" aria-label="{html.escape(label)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    return svg.replace("xlink:href", "href")


def coloured(svg: str) -> str:
    """The same in the colours and the font of the page, without names of its own."""
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names would repeat from figure to figure
    svg = svg.replace(INK, "var(--muted)").replace(GRID, "var(--line)")
    svg = svg.replace(FAINT, "var(--faint)")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()
