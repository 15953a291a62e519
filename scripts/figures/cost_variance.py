"""docs/images/cost-variance.svg: what an estimator costs against how much it varies.

From the tables of benchmarks/RESULTS.md, which ``seht bench`` has written.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from plots import OURS, PLAIN, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
MODELS = ("ResNet-18", "ResNet-18 with GroupNorm", "small GPT")


def points(model):
    """(name, trace, time, variance) of the estimators that have all of them."""
    section = re.split(r"^## ", RESULTS.read_text("utf-8"), flags=re.MULTILINE)
    [text] = [part for part in section if part.splitlines()[0] == model]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 8 or "SEHT" not in cells[0] or "backward" in cells[0]:
            continue
        time, variance = re.match(r"[\d.]+", cells[3]), re.match(r"[\d.e+-]+", cells[6])
        if time and variance:
            yield cells[0], cells[1], float(time.group()), float(variance.group().rstrip("+-"))


figure, axes = plt.subplots(1, len(MODELS), figsize=(10, 3.4), layout="constrained")
for ax, model in zip(axes, MODELS, strict=True):
    for name, trace, time, variance in points(model):
        colour = OURS if "G" in trace else PLAIN
        ax.loglog(time, variance, "o", color=colour, ms=5)
        short = re.search(r"SEHT-\w(?:, p = [\d.]+)?(?:, \d probes)?(?:, a quarter)?", name)
        away = (-5, -9) if "G" in trace else (5, 3)
        ax.annotate(
            short.group() if short else name, (time, variance), away, fontsize=7, color=colour,
            textcoords="offset points", ha="right" if time > 5 else "left",
        )  # fmt: skip
    ax.set(title=model, xlabel="time of a step, in plain steps")
    ax.set_xticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])
    ax.minorticks_off()
axes[0].set_ylabel("variance of the gradient / mean²")
for colour, name in ((OURS, "tr(G)"), (PLAIN, "tr(H)")):
    axes[0].plot([], [], "o", color=colour, label=name)
axes[0].legend(loc="lower left")
save(figure, "cost-variance.svg")
