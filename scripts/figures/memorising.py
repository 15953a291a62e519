"""Draw how test accuracy goes while wrong labels are memorised, from the records of `make demo`.

python scripts/figures/memorising.py runs/demo docs/images/memorising.svg [another.png ...]
"""

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Of the rivals and of the traces, those with the highest validation accuracy in the search that
# chose their settings; the table has all of them.
SHOWN = {
    "weight-decay": ("usual training", "#8a8f98"),
    "weight-decay(weight=0.01)": ("weight decay, tuned", "#d08a1d"),
    "mixup(alpha=1.0)": ("mixup, tuned", "#3b7dd8"),
    "seht-h(share=2.0)": ("Gauss-Newton trace, share tuned", "#c2302e"),
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
    found = curves(directory)
    if not any(method in found for method in SHOWN):
        sys.exit(f"{directory} has no test curves; run make demo, or seht compare --curve true")
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    for method, (name, colour) in SHOWN.items():
        if method not in found:
            continue
        epochs = list(zip(*found[method], strict=True))
        mean = [statistics.fmean(values) for values in epochs]
        x = range(1, len(mean) + 1)
        if len(found[method]) > 1:
            error = [statistics.stdev(values) / len(values) ** 0.5 for values in epochs]
            low = [m - e for m, e in zip(mean, error, strict=True)]
            high = [m + e for m, e in zip(mean, error, strict=True)]
            axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
        axes.plot(x, mean, color=colour, lw=2.2, label=f"{name}: {mean[-1]:.1f} % at the end")
    seeds = len(next(iter(found.values())))
    axes.set_xlim(1, None)
    axes.set_ylim(50, None)  # below it all of them only begin to learn
    axes.legend(loc="lower right", frameon=False)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        f"300 digits, 4 in 10 labels replaced at random; mean of {seeds} seeds", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    for file in files:
        figure.savefig(file, dpi=160)
        print(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
