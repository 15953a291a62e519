"""Draw every table and figure of docs/evidence again from results/evidence: studies/draw.py

A page has places, ``<!-- table digits-noisy -->`` to ``<!-- end -->``; what is between is written
here, and nothing else of the page is touched.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from plan import TASKS
from run import RECORDS, ROOT, path_of, read_record

from seht.lab.records import write
from seht.lab.report.stats import LEVEL, Difference, Mean, holm, mean, paired

DOCS = ROOT / "docs" / "evidence"
_PLACE = re.compile(r"(<!-- (?P<kind>\w+) (?P<what>\w[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
OURS = (
    *("tr(G)", "seht-s", "tr(G) share", "tr(G) share 4", "tr(G) share carried"),
    *("tr(G) tuned", "tr(G) on weight decay"),
)
"""Rows that are no rivals; the paper's are."""


@dataclass(frozen=True)
class Row:
    """A method with its judged runs."""

    key: str
    method: str
    runs: dict[int, dict[str, Any]]
    classes: int
    searched: int
    cost: dict[str, Any] | None

    @property
    def text(self) -> bool:
        """Whether it is judged by perplexity, where less is better."""
        return any("test_perplexity" in run.get("last", {}) for run in self.runs.values())

    @property
    def values(self) -> dict[int, float]:
        """What is compared, by seed; a run that diverged has guessed."""
        if self.text:
            return {s: r["best"]["test_perplexity"] for s, r in self.runs.items() if "best" in r}
        return {
            s: 100 / self.classes if "failed" in r else r["last"]["test_top1"]
            for s, r in self.runs.items()
        }

    @property
    def gains(self) -> dict[int, float]:
        """``values`` with a sign that makes more better."""
        return {s: -value for s, value in self.values.items()} if self.text else self.values

    def mean(self, *keys: str) -> Mean | None:
        """Of another figure, over the runs that ended."""
        found = []
        for run in self.runs.values():
            value: Any = run
            for key in keys:
                value = (value or {}).get(key)
            if value is not None:
                found.append(value)
        return mean(found)


def rows_of(record: dict[str, Any], *, refit: bool) -> dict[str, Row]:
    """The rows of a task, those trained again apart from the others."""
    found = {}
    for stage in record["stages"].values():
        if stage["refit"] == refit:
            for key, method in stage["rows"].items():
                runs = {int(seed): run for seed, run in stage["runs"][key].items()}
                count = stage["searched"].get(key, 0)
                cost = stage["cost"].get(key)
                found[key] = Row(key, method, runs, stage["classes"], count, cost)
    return found


def plain_steps(row: Row, rows: dict[str, Row]) -> float | None:
    """What a whole training costs in plain ones: the steps before the first penalised are plain.

    The lab times a step in the middle of the training; a row that starts later than there has
    the price of the one that differs from it in its start alone.
    """
    early = re.sub(r"warmup=[0-9.]+", "warmup=0.1", row.method)
    cost = next((r.cost for r in rows.values() if r.method == early), row.cost)
    if not cost:
        return None
    start = re.search(r"warmup=([0-9.]+)", row.method)
    return 1 + (1 - (float(start[1]) if start else 0)) * (cost["ratio"] - 1)


def against(
    rows: dict[str, Row], base: str, *, gains: bool = False
) -> dict[str, tuple[Difference, float | None]]:
    """Each row's difference to the baseline, or its gain, and Holm's p over all of them."""
    values = {key: row.gains if gains else row.values for key, row in rows.items()}
    found = {k: paired(v, values[base]) for k, v in values.items() if k != base}
    kept = {key: d for key, d in found.items() if d is not None}
    corrected = holm({key: d.p for key, d in kept.items() if d.p is not None})
    return {key: (d, corrected.get(key)) for key, d in kept.items()}


def baseline(rows: dict[str, Row]) -> str:
    """The tuned weight decay, where there is one."""
    return "weight decay" if "weight decay" in rows else next(iter(rows))


def pm(found: Mean | None, digits: int = 1) -> str:
    """``84.4 ± 0.5``."""
    if found is None:
        return ""
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}"


def interval(d: Difference, digits: int = 1) -> str:
    """``+3.1 [+1.0, +5.2]``."""
    text = f"{d.value:+.{digits}f}"
    if d.low is not None:
        text += f" [{d.low:+.{digits}f}, {d.high:+.{digits}f}]"
    return text.replace("-", "−")


_XEON = "Intel(R) Xeon(R) Processor"
EARLIER = {
    "digits-noisy": (_XEON, "ebf7a41, later 033b230"),
    "digits-noisy-fitted": (_XEON, "4e1c31c"),
    "price": (_XEON, "033b230"),
    "cancer": ("", "ed386a8"),
    "cifar10-16-noisy": ("", "047bf16"),
    "cifar10-large-noisy": ("", "7189601"),
}
"""Processor and code of a record's first runs, by its own versions in the repository: until the
evening of 18 November packing again forgot them. (The history was rebased; 4e1c31c is gone. The
large task was packed at two places; the first had the older code.)"""


def table(record: dict[str, Any], *, refit: bool = False) -> str:
    """Every row of a task, the best mean first."""
    rows = rows_of(record, refit=refit)
    if not rows:
        return "*Not run yet.*"
    base = TASKS[record["task"]].base or baseline(rows)
    differences = against(rows, base)
    text = rows[base].text
    ranked = sorted(rows.values(), key=lambda r: mean(r.values.values()).value, reverse=not text)
    priced = any(row.cost for row in ranked)
    head = ["", "method", "n", "test perplexity" if text else "test accuracy, %"]
    head += [
        f"difference to {base} [95 %]",
        "test loss",
        "calibration error, %",
        "tr(H) at the end",
    ]
    head += ["seconds", "runs of the search", *(["plain steps"] if priced else [])]
    lines = [f"| {' | '.join(head)} |", f"| --- | --- |{' ---: |' * (len(head) - 2)}"]
    for row in ranked:
        said = ""
        if row.key in differences:
            d, p = differences[row.key]
            said = interval(d) + (" *" if p is not None and p < LEVEL else "")
        failed = sum("failed" in run for run in row.runs.values())
        count = f"{len(row.runs)}" + (f" ({failed} diverged)" if failed else "")
        cells = [row.key, f"`{row.method}`".replace("|", "\\|"), count]
        cells += [pm(mean(row.values.values())), said, pm(row.mean("last", "test_loss"), 2)]
        cells += [pm(row.mean("last", "test_ece")), pm(row.mean("trace")), pm(row.mean("seconds"))]
        cells += [str(row.searched)]
        if priced:
            steps = plain_steps(row, rows)
            cells.append("" if steps is None else f"{steps:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", about(record)])


def about(record: dict[str, Any]) -> str:
    """Where a table comes from, and how to make it again."""
    machine, stages = record["machine"], record["stages"].values()
    versions = ", ".join(f"{k} {v}" for k, v in next(iter(stages))["versions"].items())
    begun = min(stage["begun"] for stage in stages)
    runs = [run for s in stages for row in s["runs"].values() for run in row.values()]
    hours = sum(run.get("seconds", 0) for run in runs) / 3600
    processor, commit = (
        f"{before}, later {machine[key]}" if before else machine[key]
        for before, key in zip(
            EARLIER.get(record["task"], ("", "")), ("processor", "commit"), strict=True
        )
    )
    return (
        f"\\*: p < 0.05 after Holm's correction over the table. The judging runs began {begun}, on "
        f"{machine['cores']} cores ({processor}), one thread a run, the machine shared "
        f"with other work; {len(runs)} of them took {hours:.2f} hours. Code {commit}; "
        f"{versions}. Again: `make study TASK={record['task']}`."
    )


def fewest(record: dict[str, Any]) -> int:
    """The seeds that every row has: rows run at another time may have more."""
    return min(len(runs) for stage in record["stages"].values() for runs in stage["runs"].values())


def missing(records: dict[str, dict[str, Any]]) -> str:
    """What the plan has and the records have not."""
    lines = []
    for name, task in TASKS.items():
        if name not in records:
            lines.append(f"- {task.title}: `make study TASK={name}`")
            continue
        record = records[name]
        there = {(s, key) for s, stage in record["stages"].items() for key in stage["rows"]}
        parts = []
        for refit, word in ((False, "the rows "), (True, "trained again: ")):
            keys = [
                k
                for s in task.stages
                if s.refit == refit
                for k in s.rows
                if (s.name, k) not in there
            ]
            if keys:
                parts.append(f"{word}{', '.join(keys)}")
        if (seeds := fewest(record)) < task.seeds:
            parts.append(f"{seeds} of {task.seeds} seeds are there")
        if parts:
            lines.append(
                f"- {task.title}: {'; '.join(parts)}; `make study TASK={name}` runs the rest"
            )
    return "\n".join(lines) or "Nothing."


def redrawn(page: str, records: dict[str, dict[str, Any]]) -> str:
    """A page with what its places ask for."""
    import paper
    from answers import verdicts

    def one(found: re.Match[str]) -> str:
        kind, what = found["kind"], found["what"]
        if kind == "verdicts":
            made = verdicts(records)
        elif kind == "missing":
            made = missing(records)
        elif kind in ("claims", "pairs"):
            name = {"claims": "claims", "pairs": "paper"}[kind]
            there = name in records
            made = getattr(paper, kind)(records[name], what) if there else "*Not measured yet.*"
        elif what not in records:
            made = f"*Not run yet: `make study TASK={what}`.*"
        else:
            made = table(records[what], refit=kind == "again")
        return f"{found[1]}\n{made}\n\n{found[4]}"

    return _PLACE.sub(one, page)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    given = parser.parse_args(arguments)
    from figures import draw

    there = [name for name in (*TASKS, "claims") if path_of(name, given.records).is_file()]
    records = {name: read_record(name, given.records) for name in there}
    for page in sorted(given.docs.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (made := redrawn(text, records)) != text:
            write(page, made)
    draw(records, given.docs / "images")


if __name__ == "__main__":
    main()
