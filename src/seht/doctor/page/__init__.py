"""The doctor's page in HTML: no script, no request, light and dark, from phone to desktop.

Its frame and its drawing are those of ``seht measure``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seht.doctor.report import DoctorReport, cost_table, loss_table, share_table, share_words
from seht.extras import need
from seht.measure.numbers import duration, number
from seht.measure.page.drawing import FAINT, INK, Panel, colour, fill, panel
from seht.measure.page.figures import LAYERS, row_names
from seht.strength.share_weight import SHARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GLOSSARY = (
    ("plain step", "Forward and backward passes of your loss, without the optimiser's step."),
    (
        "scalar, lean",
        "The two forms: penalty(closure), a loss to call backward() on, and "
        "penalty.backward(closure), which keeps one graph at a time.",
    ),
    (
        "quartiles",
        "Of the rounds. Each timed step stands between two plain ones, so that what else the "
        "machine does slows all three.",
    ),
    (
        "peak memory",
        "What tensors hold at one time beyond the weights: activations, graphs, gradients.",
    ),
    (
        "share",
        "The norm of the penalty's gradient over that of the loss's own, both averaged over probes "
        "and batches, as share= of HessianTrace has it.",
    ),
    (
        "predictions of other examples",
        "The loss with each example's outputs swapped for another's. Before training it is the "
        "same; afterwards the rise is what the model has learnt.",
    ),
)


def render(report: DoctorReport, command: str, versions: Sequence[tuple[str, str]]) -> str:
    """The page's HTML."""
    need("measure", "the page", "jinja2", "matplotlib")
    check = report.check
    return fill(
        Path(__file__).parent,
        title=f"The doctor on {report.model}",
        lead=report.verdict,
        facts=[
            ("probed weights", f"{check.weights:,} in {check.tensors} tensors"),
            ("mode", report.mode),
            ("plain step", duration(report.costs.seconds)),
            ("time", duration(report.seconds)),
        ],
        heading=report.heading,
        lines=report.lines,
        answers=[
            ("Is the gradient right?", "; ".join(map(str, check.engines.values()))),
            ("Which curvature?", f"{report.choice.curvature}: {report.choice.why}"),
            ("Which regime?", report.regime.why),
            ("How strong is a weight?", share_words(report.shares)),
        ],
        sections=[
            (
                "What a step costs",
                "In plain steps, in turns with them on this machine; lines are quartiles.",
                cost_table(report.costs),
                _costs(report),
            ),
            (
                "What a weight does",
                f"The share of each power of ten. share={SHARE:g} is the default.",
                share_table(report.shares),
                _layers(report),
            ),
            (
                "What the model has learnt",
                "Mean losses in evaluation mode; ± is one standard error over batches.",
                loss_table(report.regime),
                [],
            ),
        ],
        notes=[note[0].upper() + note[1:] for note in report.notes],
        glossary=GLOSSARY,
        command=command,
        versions=versions,
    )


def _costs(report: DoctorReport) -> list[Panel]:
    known = [cost for cost in report.costs.forms if cost.ratio is not None]
    if not known:
        return []

    def draw(axes: Axes) -> None:
        for i, cost in enumerate(known):
            assert cost.ratio is not None and cost.low is not None and cost.high is not None
            shade = colour(0 if cost.curvature == "ggn" else 1)
            axes.barh([-i], [cost.ratio], height=0.6, color=shade, lw=0)
            axes.plot([cost.low, cost.high], [-i, -i], color=INK, lw=1.2)
        axes.axvline(1, color=FAINT, lw=1)
        row_names(axes, [f"{cost.curvature}, {cost.form}" for cost in known])

    return [panel("Seconds in plain steps", draw, size=(5.0, 0.8 + 0.34 * len(known)))]


def _layers(report: DoctorReport) -> list[Panel]:
    layers = report.shares.layers
    if not layers:
        return []
    largest = sorted(layers, key=lambda name: -layers[name])[:LAYERS]
    names = [name for name in layers if name in set(largest)]

    def draw(axes: Axes) -> None:
        for i, name in enumerate(names):
            axes.plot([1, layers[name]], [-i, -i], color=FAINT, lw=1.2)
            axes.plot([layers[name]], [-i], "o", color=colour(0), ms=5)
        axes.set_xscale("log")
        axes.axvline(1, color=FAINT, lw=1)
        row_names(axes, names)

    more = f", the {LAYERS} largest of {len(layers)}" if len(layers) > LAYERS else ""
    title = f"Share by tensor, where the whole has 1{more}"
    unit = number(report.shares.unit)
    tall = 0.8 + 0.2 * len(names)
    return [panel(title, draw, x=f"share at a weight of {unit}", size=(5.0, tall))]
