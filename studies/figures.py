"""The figures of docs/evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plan import TASKS


def draw(records: dict[str, dict[str, Any]], folder: Path) -> None:
    """All that the records allow."""
    import matplotlib

    matplotlib.use("Agg")
    # The same figure twice is the same file: no date, and names of elements that do not change.
    matplotlib.rcParams.update({"svg.hashsalt": "seht", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)
    for name in TASKS.keys() & records.keys():
        record = records[name]
        rows = {key for s in record["stages"].values() for key in s["rows"]}
        if "weight decay" in rows and not TASKS[name].base:
            differences(name, record, folder / f"{name}.svg")
    if "price" in records:
        price(records["price"], folder / "price-curve.svg")
    if "cifar10-large-noisy" in records:
        learning(records["cifar10-large-noisy"], folder / "cifar10-large-noisy-curve.svg")


def differences(name: str, record: dict[str, Any], path: Path) -> None:
    """Each row's gain over the tuned weight decay, with its interval."""
    import matplotlib.pyplot as plt
    from draw import OURS, against, rows_of

    found = against(rows_of(record, refit=False), "weight decay")
    ranked = sorted(found.items(), key=lambda item: item[1][0].value)
    figure, axes = plt.subplots(figsize=(6.4, 0.6 + 0.24 * len(ranked)), layout="constrained")
    for place, (key, (d, _)) in enumerate(ranked):
        ends = None if d.low is None else [[d.value - d.low], [d.high - d.value]]
        colour = "C3" if key in OURS else "C0"
        axes.errorbar([d.value], [place], xerr=ends, fmt="o", color=colour, capsize=2)
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(ranked)), [key for key, _ in ranked])
    text = rows_of(record, refit=False)["weight decay"].text
    unit = "test perplexity" if text else "test accuracy, points"
    axes.set_xlabel(f"{unit}, difference to the tuned weight decay, paired, 95 %")
    pairs = sorted({d.n for d, _ in found.values()})
    n = " to ".join(map(str, dict.fromkeys((pairs[0], pairs[-1]))))
    axes.set_title(f"{TASKS[name].title}; n = {n}", fontsize=9)
    saved(figure, path)


_BELOW = 8
"""Points of accuracy below the weight decay that a figure of prices has room for."""


def price(record: dict[str, Any], path: Path) -> None:
    """Test accuracy against what the training costs."""
    import matplotlib.pyplot as plt
    from draw import plain_steps, rows_of

    from seht.lab.report.stats import mean

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    rows = rows_of(record, refit=False)
    known = mean(rows["weight decay"].values.values())
    floor = 0.0 if known is None else known.value - _BELOW
    for place, (key, row) in enumerate(rows.items()):
        found, steps = mean(row.values.values()), plain_steps(row, rows)
        if found is None or steps is None:
            continue
        colour = "0.4" if key == "weight decay" else "C0" if key.startswith("seht") else "C3"
        # What ended far below is at the edge, with its value: the others would be one line.
        lost = found.value < floor
        at = floor if lost else found.value
        error = None if lost else found.error
        axes.errorbar([steps], [at], yerr=error, fmt="v" if lost else "o", color=colour)
        axes.annotate(
            f"{key}: {found.value:.0f}" if lost else key,
            (steps, at),
            xytext=(5, 4 if lost or place % 2 else -9),
            textcoords="offset points",
            fontsize=7,
            rotation=30 if lost else 0,
        )
    axes.set_ylim(floor - 0.5)
    axes.margins(x=0.12)
    axes.set_xlabel("cost of the training, in plain steps")
    axes.set_ylabel("test accuracy, %, ± standard error")
    saved(figure, path)


_STYLES = {"tr(G)": "--", "tr(G) share": ":"}
"""Of our rows, which have one colour."""


def learning(record: dict[str, Any], path: Path) -> None:
    """Validation accuracy after every epoch, of the first seed; its labels are partly wrong too."""
    import matplotlib.pyplot as plt
    from draw import OURS, rows_of

    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    others = iter(("C0", "0.4", "C2", "C4", "C8"))
    for key, row in rows_of(record, refit=False).items():
        values = row.runs[min(row.runs)]["curves"]["valid_top1"]
        colour = "C3" if key in OURS else next(others)
        style = _STYLES.get(key, "-")
        axes.plot(range(1, len(values) + 1), values, style, color=colour, label=key)
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation accuracy, %")
    axes.set_title(f"{TASKS[record['task']].title}; n = 1", fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    saved(figure, path)


def saved(figure: Any, path: Path) -> None:
    """As SVG without a date."""
    import matplotlib.pyplot as plt

    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
