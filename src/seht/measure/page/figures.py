"""The page's figures: trace, layers, spectrum, density, landscape; every model in its colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from seht.measure.page import drawing
from seht.measure.page.drawing import FAINT, INK, Panel, band, limits, panel
from seht.measure.robustness import LAYER_BITS
from seht.measure.survey import Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Group = tuple[str, str, list[Panel]]
LONGEST = 28
"""Characters of a name beside a drawing; the end of a layer's name says more than its start."""
LAYERS = 40
"""The most bars that are readable; with more layers, the largest are shown."""
COLOURS = 10
"""The number of colours in the style sheet."""


def colour(number: int) -> str:
    """A model's; with more of them they come again."""
    return drawing.colour(number % COLOURS)


def groups(found: Sequence[Findings]) -> list[Group]:
    """Sections of the page: heading, hint, panels."""
    return [
        ("Trace", "Bars show the 95 % interval over probes.", _trace(found)),
        (
            "Layers",
            "Each tensor's share of the trace, from the input to the output; lines are one "
            "standard error.",
            _bars(found, "Trace by layer", [_shares(f) for f in found]),
        ),
        (
            "Spectrum",
            "The largest and the smallest eigenvalues, and where the others lie.",
            [*_figure(found, "eigenvalues"), *_figure(found, "density")],
        ),
        (
            "Landscape",
            "A step of 1 moves each filter by its own norm. The shade is one standard error over "
            "directions; contours are lines of equal loss, the dot is the model.",
            [*_figure(found, "landscape"), *_planes(found)],
        ),
        (
            "Robustness",
            "The rise of the loss under Gaussian noise of a share of each tensor's root mean "
            "square, dashed as the trace predicts it; and with one layer alone rounded to "
            f"{LAYER_BITS} bits: what rises by nothing can be rounded.",
            [*_figure(found, "robustness"), *_rounded(found)],
        ),
    ]


def _trace(found: Sequence[Findings]) -> list[Panel]:
    def draw(axes: Axes) -> None:
        for i, f in enumerate(found):
            low, high = f.trace.interval()
            if math.isfinite(low):
                axes.plot([low, high], [-i, -i], color=colour(i), lw=2.2, solid_capstyle="round")
            axes.plot([f.trace.estimate], [-i], "o", color=colour(i), ms=7)
        row_names(axes, [f.name for f in found])

    height = 0.9 + 0.42 * len(found)
    kind = "tr(G)" if found[0].trace.curvature == "ggn" else "tr(H)"
    return [panel(f"{kind} and its 95 % interval", draw, size=(5.0, height))]


Known = list[tuple[int, Any]]
"""Number and result of every model that has a part."""


def _figure(found: Sequence[Findings], part: str) -> list[Panel]:
    """One drawing of all models that have this part, if any has it."""
    title, x, draw = FIGURES[part]
    known = [(i, getattr(f, part)) for i, f in enumerate(found) if getattr(f, part) is not None]
    if part == "robustness":
        known = [(i, robust) for i, robust in known if robust.noise]
    return [panel(title, lambda axes: draw(axes, known), x=x)] if known else []


def _shares(found: Findings) -> dict[str, tuple[float, float]]:
    layers = found.trace.layers or {}
    return {name: (layer.estimate, layer.stderr) for name, layer in layers.items()}


def _rounded(found: Sequence[Findings]) -> list[Panel]:
    rises = [{} if f.robustness is None else f.robustness.layers for f in found]
    values = [{name: (rise, 0.0) for name, rise in one.items()} for one in rises]
    return _bars(found, f"Rise with one layer at {LAYER_BITS} bits", values)


def _bars(
    found: Sequence[Findings], title: str, values: Sequence[dict[str, tuple[float, float]]]
) -> list[Panel]:
    """A bar and its error for each layer of each model."""
    layered = [(i, layers) for i, layers in enumerate(values) if layers]
    names = list(dict.fromkeys(name for _, layers in layered for name in layers))
    if not names:
        return []
    if len(names) > LAYERS:

        def size(name: str) -> float:
            return max(abs(layers[name][0]) for _, layers in layered if name in layers)

        kept = set(sorted(names, key=size)[-LAYERS:])
        title = f"{title}, the {LAYERS} largest of {len(names)}"
        names = [name for name in names if name in kept]
    height = 0.8 / len(layered)

    def draw(axes: Axes) -> None:
        for k, (i, layers) in enumerate(layered):
            rows = [(row, *layers[name]) for row, name in enumerate(names) if name in layers]
            places = [-row + 0.4 - height * (k + 0.5) for row, _, _ in rows]
            widths = [value for _, value, _ in rows]
            errors = [error if math.isfinite(error) else 0.0 for _, _, error in rows]
            axes.barh(places, widths, height=0.9 * height, color=colour(i), lw=0)
            axes.errorbar(
                widths, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=0.9, capsize=0
            )
        axes.axvline(0, color=FAINT, lw=0.8)
        row_names(axes, names)

    tall = 0.7 + len(names) * max(0.2, 0.11 * len(layered) + 0.08)
    return [panel(title, draw, size=(5.0, tall))]


def _noise(axes: Axes, known: Known) -> None:
    for i, robust in known:
        x, shown = [100 * share for share in robust.noise], list(robust.noise.values())
        errors = [n.stderr if math.isfinite(n.stderr) else 0.0 for n in shown]
        axes.errorbar(x, [n.rise for n in shown], errors, fmt="o-", color=colour(i), ms=5)
        axes.plot(x, [n.predicted for n in shown], "--", color=colour(i), lw=1.2)
    noises = [n for _, robust in known for n in robust.noise.values()]
    if all(min(n.rise, n.predicted) > 0 for n in noises):
        axes.set_yscale("log")
    axes.set_xscale("log")


def _ends(axes: Axes, known: Known) -> None:
    # The last places belong to the smallest, whatever the number of the largest.
    count = max(len(ends.largest) for _, ends in known)
    last = max(len(ends.smallest) for _, ends in known)
    for place, (i, ends) in enumerate(known):
        values = [*ends.largest, *reversed(ends.smallest)]
        errors = [*ends.largest_residuals, *reversed(ends.smallest_residuals)]
        offset = 0.12 * (place - (len(known) - 1) / 2)
        start = count + 1 + last - len(ends.smallest)
        places = [1 + k + offset for k in range(len(ends.largest))]
        places += [start + 1 + k + offset for k in range(len(ends.smallest))]
        axes.vlines(places, 0, values, color=colour(i), lw=1.4)
        axes.errorbar(places, values, yerr=errors, fmt="o", color=colour(i), ms=5, elinewidth=1.2)
    axes.axhline(0, color=FAINT, lw=0.8)
    axes.set_xticks([])
    axes.xaxis.keep_ticks = True  # type: ignore[attr-defined]


def _density(axes: Axes, known: Known) -> None:
    floor = min(1e-2 / (d.size * d.width) for _, d in known)
    for i, d in known:
        axes.plot(d.grid, [max(v, floor / 10) for v in d.density], color=colour(i), lw=1.6)
        band(axes, d.grid, d.density, d.stderr, colour(i), floor / 10)
    axes.set_yscale("log")
    axes.set_ylim(floor, 2 * max(max(d.density) for _, d in known))


def _slices(axes: Axes, known: Known) -> None:
    for i, s in known:
        axes.plot(s.steps, s.mean, color=colour(i), lw=1.6)
        band(axes, s.steps, s.mean, s.stderr, colour(i))
    low, high = limits([v for _, s in known for v in s.mean])
    if low > 0 and high > 30 * low:
        axes.set_yscale("log")


def _planes(found: Sequence[Findings]) -> list[Panel]:
    known = [(i, f.name, f.plane) for i, f in enumerate(found) if f.plane is not None]
    if not known:
        return []
    values = [v for _, _, p in known for row in p.losses for v in row]
    low, high = limits(values, 0.9)  # the corners may be far higher
    levels = _levels(low, high)
    return [
        panel(f"Loss on a plane: {name}", _contours(plane, i, levels), size=(5.0, 4.2))
        for i, name, plane in known
    ]


def _levels(low: float, high: float) -> list[float]:
    """The same for every model, so that panels can be compared."""
    if not high > low:
        return [low]
    if low > 0 and high > 10 * low:
        return [low * (high / low) ** (k / 10) for k in range(1, 11)]
    return [low + (high - low) * k / 10 for k in range(1, 11)]


def _contours(plane: Any, number: int, levels: list[float]) -> Any:
    def draw(axes: Axes) -> None:
        rows = [[v if math.isfinite(v) else 1e30 for v in row] for row in plane.losses]
        lines = axes.contour(
            plane.steps, plane.steps, rows, levels=levels, colors=[colour(number)], linewidths=1.1
        )
        axes.clabel(lines, fontsize=8, fmt="%.3g", colors=[INK])
        axes.plot([0], [0], "o", color=colour(number), ms=5)
        axes.set_aspect("equal")
        axes.grid(False)

    return draw


def row_names(axes: Axes, names: Sequence[str]) -> None:
    """Rows with names, the first at the top."""
    short = [name if len(name) <= LONGEST else "…" + name[1 - LONGEST :] for name in names]
    axes.set_yticks([-i for i in range(len(names))], short)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.grid(False, axis="y")
    axes.yaxis.keep_ticks = True  # type: ignore[attr-defined]


FIGURES: dict[str, tuple[str, str, Callable[[Axes, Known], None]]] = {
    "eigenvalues": ("Largest and smallest eigenvalues", "largest … smallest", _ends),
    "density": ("Density of the eigenvalues", "eigenvalue", _density),
    "landscape": ("Loss along random directions", "relative step", _slices),
    "robustness": ("Rise under noise", "noise, % of each tensor's root mean square", _noise),
}
"""Title, what the axis shows, and who draws it, of each part with one drawing for all models."""
