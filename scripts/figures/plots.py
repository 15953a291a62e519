"""How every plot of the documentation looks, and the one way in which it is saved."""

from __future__ import annotations

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from diagram import IMAGES

OURS, PLAIN, OTHER = "#4051b5", "#d9480f", "#868e96"
plt.rcParams.update(
    {
        "svg.hashsalt": "seht",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "figure.facecolor": "white",
    }
)


def save(figure: plt.Figure, name: str) -> None:
    """As SVG in ``docs/images``, the same bytes for the same figures."""
    figure.savefig(IMAGES / name, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
