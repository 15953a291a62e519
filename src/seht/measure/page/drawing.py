"""Drawings as SVG that a page holds inline and colours itself.

Matplotlib draws with placeholder colours, each of which becomes a variable of the page's style
sheet: one drawing serves light and dark. :func:`fill` makes the page of a template.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """The placeholder for the colour of a model or method."""
    return f"#03{number:04x}"


def _style(title: str) -> Any:
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
    size: tuple[float, float] = SIZE,
    frame: tuple[float, float, float, float] | None = None,
    label: str = "",
    names: Sequence[str] = (),
    palette: str = "c",
) -> Panel:
    """Run the drawing and cut it out of Matplotlib's file.

    Args:
        title: of the panel, and the drawing's name for those who cannot see it.
        draw: draws into the axes.
        x: what the axis shows.
        size: in inches.
        frame: of the axes (left, bottom, width, height), so that panels line up; as it fits if not
            given.
        label: a longer name.
        names: of the groups ``line-0``, ``band-0`` ... that the page's style sheet can find.
        palette: colour n becomes the page's variable ``--c<n>``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style(title)):
        canvas = Figure(figsize=size, layout=None if frame else "constrained")
        axes = canvas.add_axes(frame) if frame else canvas.subplots()
        axes.set_axisbelow(True)
        draw(axes)
        axes.set_xlabel(x)
        _ticks(axes)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return Panel(title, _inline(file.getvalue(), label or title, names, palette))


def band(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    error: Sequence[float],
    shade: str,
    floor: float = -math.inf,
) -> Any:
    """The shade of one error around a line, if any is known; a logarithmic axis has a floor."""
    if not any(map(math.isfinite, error)):
        return None
    pairs = list(zip(y, error, strict=True))
    low, high = ([max(a + sign * b, floor) for a, b in pairs] for sign in (-1, 1))
    return axes.fill_between(x, low, high, color=shade, alpha=0.16, lw=0)


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
            low, high = sorted(axis.get_view_interval())
            decades = math.log10(high / low)
            subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.6 else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs) if decades > 0.5 else MaxNLocator(4))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        elif scale == "linear" and not getattr(axis, "keep_ticks", False):
            whole = axis is axes.xaxis and axes.get_xlabel() == "epoch"
            axis.set_major_locator(MaxNLocator(5, integer=whole, steps=[1, 2, 2.5, 5, 10]))


def _inline(svg: str, label: str, names: Sequence[str], palette: str) -> str:
    """The drawing alone, in the colours and the font of the page, without names of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    # A style inside an inline drawing would hold for the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    head = f'<svg {box.group()} role="img" aria-label="{html.escape(label)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    svg = svg.replace("xlink:href", "href")

    def group(found: re.Match[str]) -> str:
        kind, number = found.group(1), int(found.group(2))
        name = html.escape(names[number])
        return f'<g class="{kind} {kind}-{number}"><title>{name}</title>'

    svg = re.sub(r'<g id="(line|band)-(\d+)">', group, svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names would repeat from figure to figure
    svg = re.sub(r"#03([0-9a-f]{4})\b", lambda m: f"var(--{palette}{int(m.group(1), 16)})", svg)
    svg = svg.replace(INK, "var(--muted)").replace(GRID, "var(--line)")
    svg = svg.replace(FAINT, "var(--faint)")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def fill(folder: Path, name: str = "template.html", /, **values: Any) -> str:
    """A folder's template; one of HTML may extend ``base.html``, in the folder's ``style.css``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(name).render(**values)
