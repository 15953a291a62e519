"""The figures of "Which weight?" and "It did not help", and the table of `docs/evidence/weight.md`.

    python scripts/figures/weight.py                                  # draw, from the records
    python scripts/figures/weight.py --gather judged=DIR,DIR search=DIR,DIR   # write the records

The records (`results/weight.json.xz`) are the runs of `docs/evidence/weight-protocol.md`, gathered
from the folders that `seht compare` wrote, and the search for a share that came before them. A run
that is gathered takes the place of the same run before, and others stay; `gap` is the rule that
sees the regime, `lift` the one whose bound can be lifted, `photographs` that one on small images;
`share-digits`, `share-fitted`, `share-cancer` and `share-new` ask which share should be the default;
`onset` and `photographs-onset` are the one that grows gradually, `phase` and `photographs-phase`
the one that waits while the held-out loss falls, `photographs-same` the one before on its seeds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plots
from diagram import IMAGES
from plots import OTHER, OURS, PLAIN, plt

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "weight.json.xz"
PAGE = ROOT / "docs" / "evidence" / "weight.md"
T = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 %, by the number of runs."""
Run = dict[str, Any]


def gather(kind: str, folder: Path) -> list[Run]:
    """Every ended run of a comparison, as far as a figure or a table wants it."""
    if folder.is_file():
        return gather_new(kind, folder)
    found = []
    for file in sorted(folder.glob("runs/*/seed-*/result.json")):
        result = json.loads(file.read_text())
        data = json.loads((file.parent / "config.json").read_text())["recipe"]["data"]
        last = (result.get("metrics") or {}).get("last") or {}
        if result["status"] != "done" or "test_top1" not in last:
            print(f"left out, {result['status']}: {file.parent}")
            continue
        run = {
            "kind": kind,
            "noise": data.get("noise", 0.0),
            "again": not data.get("validation"),
            "row": file.parent.parent.name.removeprefix("seht-h_"),
            "seed": result["seed"],
            "top1": round(last["test_top1"], 3),
            "loss": round(last["test_loss"], 4),
            "train_loss": round(result["train_loss"], 4),
        }
        path = (result.get("paths") or {}).get("seht-h")
        if path:
            run["path"] = [
                [round(a, 4), float(f"{b:.4g}")]
                for a, b in zip(path["positions"][::3], path["weights"][::3], strict=True)
            ]
        found.append(run)
    return found


def gather_new(kind: str, file: Path) -> list[Run]:
    """What ``benchmarks/underfit.py --json`` wrote: every example is new, and rightly labelled."""
    return [
        {
            "kind": f"{kind}, {run['task'].split(', ')[1]}",
            "noise": 0.0,
            "again": False,
            "row": row_of_new(run["row"]),
            "seed": run["seed"],
            "top1": round(run["value"], 3),
        }
        for run in json.loads(file.read_text())
    ]


def row_of_new(row: str) -> str:
    """``share 2`` as the lab names it."""
    return "weight-decay" if row == "without" else f"share={float(row.split()[1])}"


def joined(old: list[Run], new: list[Run], *, same: tuple[str, ...]) -> list[Run]:
    """Both, without those of the old that were run again; ``same`` says which these are."""
    again = {tuple(run.get(key) for key in same) for run in new}
    return [run for run in old if tuple(run.get(key) for key in same) not in again] + new


def column(runs: list[Run], row: str, **where: Any) -> dict[int, float]:
    """Test accuracy by seed."""
    chosen = {"row": row, **where}
    return {r["seed"]: r["top1"] for r in runs if all(r[k] == v for k, v in chosen.items())}


def grid(runs: list[Run], **where: Any) -> dict[float, dict[int, float]]:
    """By fixed weight."""
    rows = {r["row"] for r in runs if r["row"].startswith("weight=") and "tuned" not in r["row"]}
    found = {float(row.split("=")[1]): column(runs, row, **where) for row in rows}
    return {weight: found[weight] for weight in sorted(found) if found[weight]}


def mean(values: dict[int, float]) -> float:
    """Over seeds."""
    return statistics.mean(values.values())


def paired(a: dict[int, float], b: dict[int, float]) -> tuple[float, float]:
    """The mean difference by seed, and half of its 95 % interval."""
    steps = [a[seed] - b[seed] for seed in a if seed in b]
    if len(steps) < 3:
        return statistics.mean(steps), math.nan
    return statistics.mean(steps), T[len(steps)] * statistics.stdev(steps) / len(steps) ** 0.5


def draw_weights(runs: list[Run]) -> None:
    """Accuracy by weight, and the ways of the tuned one."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
    for noise, colour in ((0.4, OURS), (0.2, "#2b8a3e"), (0.0, OTHER)):
        where = {"kind": "judged", "noise": noise, "again": False}
        found, plain = grid(runs, **where), column(runs, "weight-decay", **where)
        if not found or not plain:
            continue
        left.plot(list(found), [mean(v) for v in found.values()], "o-", color=colour, markersize=4)
        left.axhline(mean(plain), color=colour, linestyle=":", linewidth=1)
        newest = where | {"kind": "phase"}
        tuned = [r for r in runs if r.get("path") and all(r[k] == v for k, v in newest.items())]
        if tuned:
            place = statistics.geometric_mean(r["path"][-1][1] for r in tuned)
            top = statistics.mean(r["top1"] for r in tuned)
            left.plot([place], [top], "*", color=PLAIN, markersize=12, zorder=3)
        left.annotate(
            f"{noise:.0%} of the labels replaced", (1e-4, mean(plain) - 2.2), color=colour
        )
    left.set(xscale="log", ylim=(68, 97), xlabel="weight", title="test accuracy, %")
    left.text(1.1e-4, 69, "dotted: no penalty   star: where tuned ends", color="black", fontsize=9)
    for run in runs:
        if run.get("path") and run["noise"] == 0.4 and run["kind"] == "phase" and not run["again"]:
            right.plot(*zip(*run["path"], strict=True), color=OURS, linewidth=1, alpha=0.7)
    right.set(
        yscale="log", xlim=(0, 1), xlabel="part of the training", ylim=(5e-5, 4e-2),
        title="the tuned weight's way, ten seeds, 40 % replaced",
    )  # fmt: skip
    plots.save(figure, "which-weight.svg")


def draw_reasons(runs: list[Run]) -> None:
    """What a share gains, and in which regime there is something to gain."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4))
    search = [r for r in runs if r["kind"] == "search"]
    plain = column(search, "weight-decay")
    shares = sorted({float(r["row"][6:]) for r in search if r["row"].startswith("share=")})
    gains = {s: paired(column(search, f"share={s}"), plain)[0] for s in shares}
    left.axhline(0, color=OTHER, linewidth=1)
    left.plot(list(gains), list(gains.values()), "o-", color=OURS, markersize=4)
    left.axvspan(1, 5, color=OURS, alpha=0.08)
    left.set(
        xscale="log", ylim=(-16, 9), xlabel="share: the penalty's gradient over the loss's",
        title="gain over no penalty, points",
    )  # fmt: skip
    left.text(0.011, -14.5, "too little", color=OTHER)
    left.text(5.6, -14.5, "all there is", color=OTHER)
    bars = []
    for noise in (0.4, 0.2, 0.0):
        where = {"kind": "phase", "noise": noise, "again": False}
        tuned, none = column(runs, "weight=tuned", **where), column(runs, "weight-decay", **where)
        if tuned and none:
            bars.append((f"{noise:.0%}", *paired(tuned, none)))
    right.bar(
        [b[0] for b in bars], [b[1] for b in bars], yerr=[b[2] for b in bars], color=OURS, width=0.5
    )
    right.axhline(0, color=OTHER, linewidth=1)
    right.set(xlabel="labels replaced", title="gain of the tuned weight, points, 95 % interval")
    plots.save(figure, "it-did-not-help.svg")


@dataclass(frozen=True)
class Question:
    """What a table asks: who ran it, on what, and how far tuned may be behind."""

    kind: str
    noises: tuple[float, ...] = (0.4, 0.2, 0.0)
    trained_on: tuple[str, str] = ("240", "all 300")
    seeds: int = 10
    share: str = "share=4.0"
    behind: float = 4
    """In points: the mean difference of one run may not be lower."""
    behind_again: float = 3
    """The same where both are trained again on all examples."""
    interval: bool = True
    """Whether that is asked of the interval's lower end, not of the mean."""


DIGITS = Question("judged")
DIGITS_GAP = Question("gap")
DIGITS_LIFT = Question("lift")
DIGITS_ONSET = Question("onset")
PHOTOGRAPHS = Question(
    "photographs", (0.4, 0.0), ("1,600", "all 2,000"), 5, "share=2.0", 3, 2, interval=False
)
PHOTOGRAPHS_ONSET = replace(PHOTOGRAPHS, kind="photographs-onset")
DIGITS_PHASE = Question("phase")
PHOTOGRAPHS_PHASE = replace(PHOTOGRAPHS, kind="photographs-phase")


def table(runs: list[Run], asked: Question) -> str:
    """The judged rows of a kind, and the protocol's verdicts."""
    lines = [
        "| labels replaced | trained on | seeds | without | best fixed weight | tuned | "
        f"{asked.share.removesuffix('.0').replace('=', ' ')} | tuned, to the best fixed | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for noise in asked.noises:
        for again in (False, True):
            where = {"kind": asked.kind, "noise": noise, "again": again}
            found = grid(runs, **where)
            tuned = column(runs, "weight=tuned", **where)
            begin = f"| {noise:.0%} | {asked.trained_on[again]} |"
            seeds = set(tuned).intersection(*found.values())
            if not found or not seeds:
                lines.append(f"{begin} 0 |  |  |  |  |  | not run |")
                continue
            weight = max(found, key=lambda w: mean({s: found[w][s] for s in seeds}))
            cells = [
                f"{mean({s: v[s] for s in seeds if s in v}):.1f}" if v else ""
                for v in (
                    column(runs, "weight-decay", **where),
                    found[weight],
                    tuned,
                    column(runs, asked.share, **where),
                )
            ]
            cells[1] += f" ({weight:g})"
            off, half = paired({s: tuned[s] for s in seeds}, found[weight])
            low = off - half if again and asked.interval else off
            good = low >= -(asked.behind_again if again else asked.behind)
            verdict = "yes" if good else "no"
            if len(seeds) < asked.seeds:
                verdict += f", of {len(seeds)} seeds"
            what = "tuned, again" if again else "tuned"
            interval = "" if math.isnan(half) else f" [{off - half:+.1f}, {off + half:+.1f}]"
            lines.append(
                f"{begin} {len(seeds)} | "
                f"{' | '.join(cells)} | {off:+.1f}{interval} | "
                f"{what}: {verdict} |"
            )
    return "\n".join(lines)


SHARES = {
    ("share-digits", 0.4): "digits, 40 % replaced",
    ("share-digits", 0.2): "digits, 20 %",
    ("share-fitted", 0.4): "digits, 40 %, steps enough to learn them all",
    ("share-cancer", 0.4): "a table of patients, 40 %",
    ("share-digits", 0.0): "digits, right labels",
    ("share-cancer", 0.0): "a table of patients, right labels",
    ("share-new, SGD", 0.0): "new examples only, SGD",
    ("share-new, AdamW", 0.0): "new examples only, AdamW",
}


def shares(runs: list[Run]) -> str:
    """What each share gains over no penalty, with the standard error."""
    those = [run for run in runs if (run["kind"], run["noise"]) in SHARES]
    tried = sorted({float(r["row"][6:]) for r in those if r["row"].startswith("share=")})
    head = " | ".join(f"share {share:g}" for share in tried)
    lines = [f"| | seeds | {head} |", f"| --- | ---: |{' ---: |' * len(tried)}"]
    for (kind, noise), title in SHARES.items():
        here = [run for run in those if run["kind"] == kind and run["noise"] == noise]
        plain = column(here, "weight-decay")
        cells = []
        for share in tried:
            found = column(here, f"share={share}")
            off = [found[seed] - plain[seed] for seed in found]
            error = statistics.stdev(off) / len(off) ** 0.5 if off else math.nan
            gain = f"{statistics.mean(off):+.1f} ± {error:.1f}" if off else ""
            cells.append(gain.replace("-", "−"))
        lines.append(f"| {title} | {len(plain)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(name: str, lines: str) -> None:
    """Put a table in its place on the page."""
    page, begin, end = PAGE.read_text(), f"<!-- {name} -->\n", "<!-- end -->"
    head, rest = page.split(begin)
    PAGE.write_text(f"{head}{begin}\n{lines}\n\n{end}{rest.split(end, 1)[1]}")


def main() -> None:
    """Gather, or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gather", nargs="+", metavar="KIND=DIR,DIR")
    options = parser.parse_args()
    runs = json.loads(lzma.decompress(RECORDS.read_bytes())) if RECORDS.exists() else []
    if options.gather:
        for part in options.gather:
            kind, folders = part.split("=", 1)
            for folder in folders.split(","):
                new = gather(kind, Path(folder))
                runs = joined(runs, new, same=("kind", "noise", "again", "row", "seed"))
        RECORDS.write_bytes(lzma.compress(json.dumps(runs).encode()))
        print(f"{len(runs)} runs in {RECORDS.relative_to(ROOT)}")
        return
    IMAGES.mkdir(exist_ok=True)
    draw_weights(runs)
    draw_reasons(runs)
    fill("shares", shares(runs))
    fill("table", table(runs, DIGITS))
    fill("gap", table(runs, DIGITS_GAP))
    fill("lift", table(runs, DIGITS_LIFT))
    fill("photographs", table(runs, PHOTOGRAPHS))
    fill("onset", table(runs, DIGITS_ONSET))
    fill("photographs-onset", table(runs, PHOTOGRAPHS_ONSET))
    fill("phase", table(runs, DIGITS_PHASE))
    fill("photographs-phase", table(runs, PHOTOGRAPHS_PHASE))


if __name__ == "__main__":
    main()
