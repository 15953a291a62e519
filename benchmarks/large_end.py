"""What the paper's four tables cost in GPU hours: an estimate, from figures named below.

    python benchmarks/large_end.py

Nothing is measured here. A plain run's hours come from public throughput figures, a method's ratio
to it from `seht bench` (benchmarks/RESULTS.md) and from the demonstration in the README; rows,
seeds and grids are the presets'. docs/large-end.md has the table, with the sources' addresses.
"""

from dataclasses import dataclass

from seht.lab.methods.parse import parse
from seht.lab.paper import preset
from seht.lab.recipes import recipe
from seht.lab.search import candidates

SEEDS = 5

# --- ratios -----------------------------------------------------------------------------------

# Step ratios of one probe and of five for SEHT-H, and of one for SEHT-D by p: `seht bench`.
RESNET18 = {"h": {1: 3.01, 5: 11.18}, "d": {0.01: 1.21, 0.05: 1.93}}
LSTM = {"h": {1: 3.20}, "d": {0.01: 1.11, 0.05: 1.52}}
# The demonstration's, on a network so small that Python's overhead is in them.
OTHERS = {"jacobian": 1.95, "htr-middle": 1.27}


def ratio(text, figures):
    """A step of the method in plain steps; one that has no figure here counts as 1."""
    ((name, options),) = parse(text).parts.items()
    probes = int(options.get("probes", 1))
    if name == "seht-h":
        measured = figures["h"]
        return measured.get(probes, 1 + probes * (measured[1] - 1))
    if name == "seht-d":
        return 1 + probes * (figures["d"][float(options["prob"])] - 1)
    return OTHERS.get(name, 1.0)


# --- plain runs -------------------------------------------------------------------------------


@dataclass
class Source:
    """Hours of a plain run on one GPU."""

    gpu: str
    hours: float


KEPT = 45_000 / 50_000  # 5,000 images are held out; the sources train on all of them
EPOCHS, BATCHES, TOKENS, WORDS = 40, 2983, 20 * 35, 33_278


def operations(gates, hidden):
    """Multiply-adds for a token in two recurrent layers and the decoder."""
    return 2 * gates * 2 * hidden**2 + hidden * WORDS


def text_hours(gates):
    """From 8.2 ms a batch for an LSTM of 200, at the same rate of multiply-adds."""
    scale = operations(gates, 512) / operations(4, 200)
    return EPOCHS * BATCHES * 8.2e-3 * scale / 3600


TABLES = {
    "table1": (RESNET18, [Source("V100S", KEPT * 50 / 60)]),
    "table2": (
        RESNET18,
        [Source("GTX 1080 Ti", KEPT * (6 + 35 / 60)), Source("V100", KEPT * (4 + 36 / 60))],
    ),
    "table3": (LSTM, [Source("not named", text_hours(4))]),
    "table4": (LSTM, [Source("not named", text_hours(3))]),
}


def searched(name, figures):
    """Plain runs that one seed of the paper's grid is worth."""
    chosen = recipe(preset(name).recipe)
    total = 0.0
    for method in dict.fromkeys(text.split("(")[0] for text in preset(name).methods):
        found = candidates(method, chosen)
        if len(found) > 1:
            own = chosen.settings.get(method, {})
            for text in found:
                (options,) = parse(text).parts.values()
                full = {**own, **options}
                written = ",".join(f"{key}={value}" for key, value in full.items())
                total += ratio(f"{method}({written})", figures)
    return total


def main():
    heads = ["table", "GPU", "a plain run, h", "rows", "all rows, in plain runs", "a seed, h"]
    heads += [f"{SEEDS} seeds, h", "the grid, one seed, h"]
    print("| " + " | ".join(heads) + " |")
    print("| --- | --- |" + " ---: |" * (len(heads) - 2))
    for name, (figures, sources) in TABLES.items():
        rows = [ratio(row.method, figures) for row in preset(name).rows]
        grid = searched(name, figures)
        for source in sources:
            cells = [name[-1], source.gpu, f"{source.hours:.2f}", len(rows), f"{sum(rows):.1f}"]
            for runs in (sum(rows), SEEDS * sum(rows), grid):
                cells.append(f"{runs * source.hours:.0f}")
            print("| " + " | ".join(map(str, cells)) + " |")
    print()
    for name, (figures, _) in TABLES.items():
        found = {row.method: ratio(row.method, figures) for row in preset(name).rows}
        more = ", ".join(f"{text} {value:.2f}" for text, value in found.items() if value != 1)
        print(f"{name}, rows that are not taken as 1: {more}")


if __name__ == "__main__":
    main()
