"""Draw how test accuracy goes while wrong labels are memorised, from the records of `make demo`.

python scripts/figures/memorising.py runs/demo docs/images/memorising.svg [another.png ...]
"""

import csv
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

USUAL = "weight-decay"
# Of the rivals and of the traces, those with the highest validation accuracy in the search that
# chose their settings; the table has all of them.
SHOWN = {
    USUAL: ("usual training", "#737984"),
    "weight-decay(weight=0.01)": ("weight decay, tuned", "#b8720a"),
    "mixup(alpha=1.0)": ("mixup, tuned", "#3b7dd8"),
    "seht-h(share=2.0)": ("Gauss-Newton trace,\nshare tuned", "#c2302e"),
}


def curves(directory):
    """By method: for each seed the test accuracies of its epochs."""
    found = defaultdict(list)
    for file in sorted(Path(directory).glob("runs/*/seed-*/metrics.csv")):
        config = (file.parent / "config.json").read_text(encoding="utf-8")
        method = json.loads(config)["method"]
        rows = list(csv.DictReader(file.open(encoding="utf-8")))
        if rows and "test_top1" in rows[0]:
            found[method].append([float(row["test_top1"]) for row in rows])
    return found


def main(directory, *files):
    """One line for each of the methods shown, with a band of one standard error."""
    found = {method: runs for method, runs in curves(directory).items() if method in SHOWN}
    if not found:
        sys.exit(f"{directory} has no test curves; run make demo, or seht compare --curve true")
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    means = {m: [statistics.fmean(step) for step in zip(*found[m], strict=True)] for m in found}
    for method, mean in means.items():
        _, colour = SHOWN[method]
        x = range(1, len(mean) + 1)
        if len(found[method]) > 1:
            steps = zip(*found[method], strict=True)
            error = [statistics.stdev(values) / len(values) ** 0.5 for values in steps]
            low = [m - e for m, e in zip(mean, error, strict=True)]
            high = [m + e for m, e in zip(mean, error, strict=True)]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(x, mean, color=colour, lw=2.4)
    ends = sorted((mean[-1], method) for method, mean in means.items())
    lowest, highest = ends[0][0], max(map(max, means.values()))
    reach = highest - lowest
    # Below it all of them only begin to learn; what matters is how they go on.
    axes.set_ylim(lowest - 1.2 * reach, highest + 0.25 * reach)
    last, place = max(map(len, means.values())), -math.inf
    for end, method in ends:
        name, colour = SHOWN[method]
        place = max(end, place + 0.14 * reach)  # or the texts would touch
        text = f"{name} {end:.1f}"
        axes.text(last + 1, place, text, color=colour, va="baseline", fontsize=9.5, weight="bold")
    if USUAL in means:
        forget(axes, means[USUAL], reach)
    seeds = max(map(len, found.values()))
    axes.set_xlim(1, last)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        f"300 digits, 4 in 10 labels replaced at random; mean of {seeds} seeds",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    for file in files:
        figure.savefig(file, dpi=160)
        print(file)


def forget(axes, mean, reach):
    """What the usual training has known and forgets, where it does."""
    best = max(range(len(mean)), key=mean.__getitem__)
    if mean[best] - mean[-1] < 1:
        return
    _, colour = SHOWN[USUAL]
    words = {"color": colour, "fontsize": 9.5}
    axes.plot([best + 1], [mean[best]], "o", color=colour, ms=7)
    axes.annotate(
        f"usual training\nat its best: {mean[best]:.1f}",
        (best + 0.3, mean[best]),
        (0.04 * len(mean), mean[best] + 0.2 * reach),
        arrowprops={"arrowstyle": "->", "color": colour, "shrinkB": 4},
        **words,
    )
    where = 0.62 * len(mean), mean[-1] - 0.12 * reach
    axes.text(*where, "... then it learns\nthe wrong labels by heart", va="top", **words)


if __name__ == "__main__":
    main(*sys.argv[1:])
