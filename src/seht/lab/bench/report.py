"""The findings as Markdown and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

import seht
from seht.lab.bench.results import CaseResult, RowResult, Settings

GOALS: list[tuple[str, str, str, float]] = [
    ("resnet18", "hessian/lean", "ratio", 3.15),
    ("resnet18", "hessian/scalar", "ratio", 3.25),
    ("resnet18", "ggn/lean", "ratio", 2.5),
    ("resnet18", "ggn/scalar", "ratio", 2.15),
    ("resnet18", "hessian/five", "ratio", 11.5),
    ("resnet18", "hessian/d0.01", "ratio", 1.3),
    ("resnet18", "hessian/d0.05", "ratio", 2.05),
    ("resnet18", "hessian/lean", "memory", 1.3),
    ("resnet18", "hessian/scalar", "memory", 2.1),
    ("resnet18", "ggn/scalar", "memory", 2.0),
    ("resnet18", "hessian/scalar", "compiled", 3.3),
    ("resnet18-group", "hessian/s", "ratio", 5.4),
    ("resnet18-group", "ggn/s", "ratio", 3.3),
    ("lstm", "hessian/scalar", "ratio", 3.2),
    ("lstm", "ggn/scalar", "ratio", 2.4),
    ("gpt", "hessian/scalar", "ratio", 3.25),
    ("gpt", "ggn/scalar", "ratio", 2.3),
]
"""Model, row, what is measured, and the most it should be."""

BOUNDS: dict[tuple[str, str, str], str] = {
    ("resnet18", "hessian/lean", "ratio"): (
        "three passes; beside each of the two perturbed ones the signs are drawn again, met with "
        "the gradient, the weights moved and restored, the gradient added to the sum, and masks "
        "made of their bits. In a profile that was some 110 ms, of 625 of a plain step."
    ),
    ("resnet18", "hessian/scalar", "compiled"): (
        "decisions leave and enter compiled code as tensors of their own, which the plain step's "
        "graph does not have: in a profile 35 ms for each perturbed pass, of 630 of a plain step."
    ),
    ("resnet18", "hessian/five", "ratio"): (
        "eleven passes; beside each of the ten perturbed ones a probe is drawn and met with the "
        "gradient, the weights are moved and restored, and the gradient is added to the sum."
    ),
    ("gpt", "hessian/scalar", "ratio"): (
        "three passes in many small calls, each seen by the mode, and the weights moved, restored "
        "and summed up: 6 ms in a profile, of 74 of a plain step."
    ),
    ("gpt", "ggn/scalar", "ratio"): (
        "many small calls, as for tr(H), and cross-entropy's curvature along the probe besides: "
        "5 ms in a profile, of 58 of a plain step."
    ),
    ("lstm", "hessian/scalar", "ratio"): (
        "three passes, and beside them those over 3.5 million weights (moved, restored, met with "
        "the signs, summed up and handed out): 14 ms in a profile, of 77 of a plain step."
    ),
    ("lstm", "ggn/scalar", "ratio"): (
        "the logits are as many numbers as the weights (3.5 million), and cross-entropy's "
        "curvature along the probe is several passes over them: 20 ms in a profile with those "
        "over the weights, of 84 of a plain step."
    ),
}
"""What stands in the way where a target is missed."""

HOW = """\
Time and memory are those of a whole training step (zero_grad, forward, backward, SGD with
momentum), in plain steps of the same model.

- **limit**: the passes alone, in plain steps.
- **time**: every timed step stands between two plain ones, whose mean it is divided by; the median
  over rounds and the quartiles. SEHT-D differs from step to step: undrawn steps and steps drawn
  evenly over the order of their first layer, weighted by their probability, and the mean over
  rounds. The row of the plain step shows what two equal things differ by. The engine's own checks
  are not in it; the notes say what they cost. Freed memory {kept} with the process: to get pages
  from the system anew costs plain and penalised steps alike, and differs from hour to hour.
- **memory**: the peak of model, batch and training step (weights, gradients, momentum, graph), each
  row in a process of its own; in brackets with one of the engine's checks.
- **error**: relative L2 distance of the penalty's gradient, over all parameters, from that of the
  same draw on a float64 copy of the model; the median over {error_draws} draws, after {train} steps
  of training.
- **variance**: E|g - m|^2 / |m|^2, g the penalty's gradient and m its mean over draws, unbiased, up
  to {variance_draws} draws, after {train} steps of training; +- the standard error (jackknife).
  Rows with the same draws share it, five probes have a fifth. SEHT-D is rescaled to estimate the
  whole trace; `on=` draws another quarter of the batch for each probe.
- **variance x time** ranks the estimators of one quantity: less is better.
"""


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.system() + " " + platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seht": seht.__version__,
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
        "models": [result.as_dict() for result in results],
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
    lines = [
        "# What the estimators cost, and what they are worth",
        "",
        f"`{about['command']}`, {about['seconds'] / 60:.1f} minutes, {about['date']}: "
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {about['system']}, "
        f"torch {about['torch']}, Python {about['python']}, seht {about['seht']}; "
        f"load before the start {_number(about['load'])}.",
        "",
        HOW.format(**vars(settings), kept="stays" if about.get("kept") else "does not stay"),
    ]
    if (about["load"] or 0) > 0.5:
        busy = "**The machine had other work before this started: do not trust the times.**"
        lines += [busy, ""]
    lines += _goals(results)
    if plot is not None:
        lines += [f"![cost against variance]({plot})", ""]
    for result in results:
        lines += _section(result)
    return "\n".join(lines).rstrip() + "\n"


def _goals(results: Sequence[CaseResult]) -> list[str]:
    found, missed = [], []
    by_name = {result.name: result for result in results}
    for name, key, what, wanted in GOALS:
        result = by_name.get(name)
        if result is None:
            continue
        table = result.compiled if what == "compiled" else result.rows
        row = next((row for row in table if row.key == key), None)
        if row is None:
            continue
        value = row.memory if what == "memory" else row.ratio
        if value is None:
            continue
        quantity = {"ratio": "time", "memory": "memory", "compiled": "time, compiled"}[what]
        verdict = "yes" if value <= wanted else "no"
        if value > wanted and (name, key, what) in BOUNDS:
            why = BOUNDS[name, key, what]
            missed.append(f"- {result.title}, {_name(row)}, {quantity}: {why}")
        found.append(
            f"| {result.title}, {_name(row)} | {quantity} | {wanted:g} | {value:.2f} | {verdict} |"
        )
    if not found:
        return []
    lines = ["## Targets", "", "| | | at most | found | reached |", _rule(5), *found, ""]
    return [*lines, "What bounds what is missed:", "", *missed, ""] if missed else lines


def _section(result: CaseResult) -> list[str]:
    lines = [f"## {result.title}", ""]
    lines += [f"- {what}: {size}" for what, size in result.sizes.items()]
    plain = f"- a plain step: {1e3 * result.plain_seconds:.3g} ms"
    if result.plain_mib is not None:
        plain += f", {result.plain_mib:.3g} MiB"
    head = "| | | limit | time | memory | error | variance | variance x time |"
    lines += [plain, "", head, _rule(8)]
    lines += [_line(row) for row in result.rows]
    if result.compiled:
        lines += ["", "Compiled, over a compiled plain step:", "", "| | | limit | time |", _rule(4)]
        lines += [
            f"| {row.label} | {_trace(row)} | {_number(row.limit)} | {_time(row)} |"
            for row in result.compiled
        ]
    notes = [*result.notes]
    for row in result.rows:
        notes += [f"{_name(row)}: {note}" for note in row.notes]
    return [*lines, "", *(f"- {note}" for note in notes), ""]


def _line(row: RowResult) -> str:
    memory = _number(row.memory)
    if row.check_memory is not None:
        memory += f" ({_number(row.check_memory)})"
    error = "" if row.error is None else f"{row.error:.1e}"
    cells = [
        row.label,
        _trace(row),
        _number(row.limit),
        _time(row),
        memory,
        error,
        _number(row.variance) + _error(row),
        _number(row.variance_time),
    ]
    return "| " + " | ".join(cells) + " |"


def _time(row: RowResult) -> str:
    if row.ratio is None:
        return ""
    spread = f" ({row.low:.2f} to {row.high:.2f})" if row.rounds > 1 else ""
    return f"{row.ratio:.2f}{spread}"


def _error(row: RowResult) -> str:
    return "" if row.variance_error is None else f" +- {_number(row.variance_error)}"


def _trace(row: RowResult) -> str:
    return {"hessian": "tr(H)", "ggn": "tr(G)", None: ""}[row.curvature]


def _name(row: RowResult) -> str:
    return f"{row.label}, {_trace(row)}" if row.curvature else row.label


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.{0 if abs(value) >= 100 else 1}f}"


def _rule(columns: int) -> str:
    return "| " + " | ".join(["---"] * columns) + " |"
