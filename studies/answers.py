"""The protocol's questions 1 to 6, answered from the records."""

from __future__ import annotations

from typing import Any

from draw import OURS, Row, against, interval, rows_of
from plan import TASKS

from seht.lab.report.stats import LEVEL, Difference, mean, paired


def verdicts(records: dict[str, dict[str, Any]]) -> str:
    """The protocol's questions 1 to 6, for every task that was run."""
    head = ["task", "n", "1. tr(G) against weight decay", "2. against the best rival"]
    head += ["3. harm?", "4. tuned against the grid", "the same, trained again"]
    head += ["5. the share of `digits-noisy`", "6. on top of weight decay"]
    found = rows_of(records["digits-noisy"], refit=False) if "digits-noisy" in records else {}
    share = found["tr(G) share"].method if "tr(G) share" in found else None
    lines = [f"| {' | '.join(head)} |", f"| --- |{' --- |' * (len(head) - 1)}"]
    for name, record in ((name, records[name]) for name in TASKS if name in records):
        rows, again = rows_of(record, refit=False), rows_of(record, refit=True)
        if "weight decay" not in rows or len(rows["weight decay"].runs) < 2:
            continue  # one seed has no interval, and decides nothing
        text = rows["weight decay"].text
        base = against(rows, "weight decay", gains=True)
        ours = next((k for k in ("tr(G)", "tr(G) share") if k in rows), None)
        if ours is None:
            continue
        rivals = [row for key, row in rows.items() if key not in OURS]
        best = max(rivals, key=lambda row: mean(row.gains.values()).value)
        title = f"`{name}`, perplexity" if text else f"`{name}`"
        cells = [title, str(len(rows["weight decay"].runs)), _yes(base, ours)]
        one = paired(rows[ours].gains, best.gains)
        cells.append("" if one is None else f"{_positive(one)}: {interval(one)} ({best.key})")
        harm = _harm(base[ours][0])
        cells.append("" if text and harm != "harm" else harm)  # a point is one of accuracy
        cells += [_close(rows, "tr(G) tuned", "tr(G)"), _close(again, "tr(G) tuned", "tr(G)")]
        # A share that was searched on the task itself does not answer whether one can be carried.
        carried = next((key for key, row in rows.items() if row.method == share), None)
        cells += [_yes(base, carried), _yes(base, "tr(G) on weight decay")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _yes(found: dict[str, tuple[Difference, float | None]], key: str | None) -> str:
    if key is None or key not in found:
        return ""
    d, p = found[key]
    word = "yes" if p is not None and p < LEVEL and d.value > 0 else "no"
    return f"{word}: {interval(d)}"


def _positive(d: Difference) -> str:
    return "yes" if d.low is not None and d.low > 0 else "no"


def _harm(d: Difference) -> str:
    if d.low is None or d.high is None:
        return ""
    if d.high < 0:
        return "harm"
    return "no harm" if d.low > -1 else "undecided"


def _close(rows: dict[str, Row], one: str, other: str) -> str:
    if one not in rows or other not in rows:
        return ""
    d = paired(rows[one].values, rows[other].values)
    return f"{'yes' if d.low is not None and d.low >= -3 else 'no'}: {interval(d)}"
