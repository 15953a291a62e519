"""Does the tuned weight do harm? The tables of `docs/evidence/weight.md` that say so.

    python scripts/figures/regimes.py                         # the tables, from the records
    python scripts/figures/regimes.py --rule phase --gather DIR DIR ... --underfit FILE

The records (`results/regimes.json.xz`) are runs of `docs/evidence/weight-protocol.md`: of folders
that `seht compare` wrote, and of the file that `benchmarks/underfit.py --json` did. A run that is
gathered for a rule (`gap`, `lift`, `onset`, `phase`, `short`) takes the place of the same run before; others stay.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
from pathlib import Path
from typing import Any

from weight import ROOT, fill, joined, paired

RECORDS = ROOT / "results" / "regimes.json.xz"
WORSE = {"accuracy": 1.0, "perplexity": 1.0}
"""How far below is too far: points, per cent."""
RULES = ("gap", "lift", "onset", "phase", "short")
"""Of the tuned weight, in the order in which they were judged; the last two are the library's."""
Run = dict[str, Any]


def gather(folder: Path) -> list[Run]:
    """Every ended run of a comparison."""
    found = []
    for file in sorted(folder.glob("runs/*/seed-*/result.json")):
        result = json.loads(file.read_text())
        recipe = json.loads((file.parent / "config.json").read_text())["recipe"]
        last = (result.get("metrics") or {}).get("last") or {}
        if result["status"] != "done":
            print(f"left out, {result['status']}: {file.parent}")
            continue
        text = "test_perplexity" in last
        noise = recipe["data"].get("noise") or 0
        path = ((result.get("paths") or {}).get("seht-h") or {}).get("weights") or [None]
        found.append(
            {
                "task": recipe["name"]
                + (f", {recipe['optim'].get('name', 'sgd')}" if text else "")
                + (f", {noise:.0%} replaced" if noise else ""),
                "row": "tuned" if "tuned" in file.parent.parent.name else "without",
                "seed": result["seed"],
                "measure": "perplexity" if text else "accuracy",
                "value": round(last["test_perplexity" if text else "test_top1"], 4),
                "train_loss": round(result["train_loss"], 4),
                "steps": result["steps"],
                "weights": [path[0], path[-1]],
            }
        )
        if text:  # what early stopping keeps; the first runs of text do not have it
            best = result["metrics"].get("best") or last
            found[-1]["best"] = round(best["test_perplexity"], 4)
    return found


def off(runs: list[Run]) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Without, tuned, and how much better that is: points, or per cent of the perplexity."""
    without = {r["seed"]: r["value"] for r in runs if r["row"] == "without"}
    tuned = {r["seed"]: r["value"] for r in runs if r["row"] == "tuned" and r["seed"] in without}
    if runs[0]["measure"] == "perplexity":
        return without, tuned, {s: 100 * (1 - tuned[s] / without[s]) for s in tuned}
    return without, tuned, {s: tuned[s] - without[s] for s in tuned}


def table(runs: list[Run]) -> str:
    """A line for each task, with the protocol's verdict."""
    lines = [
        "| task | steps | seeds | without | tuned | better by, 95 % | weight, first to last | harm |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for task in dict.fromkeys(r["task"] for r in runs):
        rows = [r for r in runs if r["task"] == task]
        without, tuned, better = off(rows)
        middle, half = paired(better, dict.fromkeys(better, 0.0))
        unit = " %" if rows[0]["measure"] == "perplexity" else ""
        harm = middle + half < 0 or middle < -WORSE[rows[0]["measure"]]
        ends = [r["weights"] for r in rows if r["row"] == "tuned" and r["weights"][0]]
        went = " to ".join(f"{statistics.geometric_mean(w):.2g}" for w in zip(*ends, strict=True))
        both = [statistics.mean(v[s] for s in tuned) for v in (without, tuned)]
        interval = "" if math.isnan(half) else f" [{middle - half:+.1f}, {middle + half:+.1f}]"
        lines.append(
            f"| {task} ({rows[0]['measure']}) | {rows[0]['steps']} | {len(tuned)} | {both[0]:.1f} "
            f"| {both[1]:.1f} | {middle:+.1f}{interval}{unit} "
            f"| {went} | {'**yes**' if harm else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Gather, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gather", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--underfit", type=Path, metavar="FILE")
    parser.add_argument("--rule", choices=RULES, default=RULES[-1])
    options = parser.parse_args()
    runs = [
        {"rule": RULES[0], **run}  # the first ones do not say it
        for run in json.loads(lzma.decompress(RECORDS.read_bytes()))
    ]
    if options.gather is not None:
        new = [run for folder in options.gather for run in gather(folder)]
        if options.underfit:
            new += json.loads(options.underfit.read_text())
        new = [{**run, "rule": options.rule} for run in new]
        runs = joined(runs, new, same=("rule", "task", "row", "seed"))
        RECORDS.write_bytes(lzma.compress(json.dumps(runs).encode()))
        print(f"{len(runs)} runs in {RECORDS.relative_to(ROOT)}")
    for rule in RULES:
        fill(f"harm-{rule}", table([run for run in runs if run["rule"] == rule]))


if __name__ == "__main__":
    main()
