"""The findings as JSON and as Markdown, of which ``report.md`` is the template."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from seht.lab.bench.results import CaseResult, RowResult, Settings
from seht.lab.records import versions
from seht.measure.page.drawing import fill

HERE = Path(__file__).parent
TRACES = {"hessian": "tr(H)", "ggn": "tr(G)", None: ""}


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.system() + " " + platform.machine(),
        **versions(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def joined(earlier: Sequence[dict[str, Any]], now: dict[str, Any] | None) -> dict[str, Any]:
    """One account of a report that was measured in pieces: all calls, the sum of their times, the
    largest load before one of them, and otherwise the last one's.
    """
    parts = [*earlier, *([] if now is None else [now])]
    loads = [part["load"] for part in parts if part["load"] is not None]
    return {
        **parts[-1],
        "command": "; ".join(dict.fromkeys(part["command"] for part in parts)),
        "seconds": sum(part["seconds"] for part in parts),
        "load": max(loads, default=None),
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def to_json(results: Sequence[CaseResult], settings: Settings, about: dict[str, Any]) -> str:
    """Everything, with ``null`` for what was not measured; never NaN."""
    data = {
        "machine": about,
        "settings": vars(settings),
        "models": [asdict(result) for result in results],
    }
    return json.dumps(data, indent=2, allow_nan=False)


def to_markdown(
    results: Sequence[CaseResult],
    settings: Settings,
    about: dict[str, Any],
    *,
    plot: str | None = None,
) -> str:
    """The report."""
    text = fill(
        HERE,
        "report.md",
        results=results,
        settings=settings,
        about=about,
        plot=plot,
        goals=list(_goals(results)),
        cells=_cells,
        notes=_notes,
        number=_number,
    )
    return text.rstrip() + "\n"


def _goals(results: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
    """What ``goals.json`` wants of the rows that were measured, and what was found."""
    by_name = {result.name: result for result in results}
    for goal in json.loads((HERE / "goals.json").read_text(encoding="utf-8")):
        result, what = by_name.get(goal["model"]), goal["what"]
        if result is None:
            continue
        table = result.compiled if what == "compiled" else result.rows
        row = next((row for row in table if row.key == goal["row"]), None)
        value = None if row is None else row.memory if what == "memory" else row.ratio
        if row is not None and value is not None:
            quantity = {"ratio": "time", "memory": "memory", "compiled": "time, compiled"}[what]
            name, missed = f"{result.title}, {_name(row)}", value > goal["most"]
            yield {**goal, "name": name, "quantity": quantity, "value": value, "missed": missed}


def _notes(result: CaseResult) -> list[str]:
    return [*result.notes, *(f"{_name(row)}: {note}" for row in result.rows for note in row.notes)]


def _cells(row: RowResult) -> list[str]:
    time, memory, variance = "", _number(row.memory), _number(row.variance)
    if row.ratio is not None:
        spread = f" ({row.low:.2f} to {row.high:.2f})" if row.rounds > 1 else ""
        time = f"{row.ratio:.2f}{spread}"
    if row.check_memory is not None:
        memory += f" ({_number(row.check_memory)})"
    if row.variance_error is not None:
        variance += f" +- {_number(row.variance_error)}"
    error = "" if row.error is None else f"{row.error:.1e}"
    start = [row.label, TRACES[row.curvature], _number(row.limit), time]
    return [*start, memory, error, variance, _number(row.variance_time)]


def _name(row: RowResult) -> str:
    return f"{row.label}, {TRACES[row.curvature]}" if row.curvature else row.label


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.{0 if abs(value) >= 100 else 1}f}"
