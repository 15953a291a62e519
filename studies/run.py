"""Run tasks of the study and pack their records: studies/run.py TASK ... [--seeds N] [OPTIONS]

Every stage is one ``seht compare``, which skips what is done: after a stop the same command goes
on. OPTIONS go to it as they are, say ``--jobs 2`` or ``--engine ray --address auto``.

With ``--chosen`` nothing is searched: the seeds that rows of the record lack are judged with the
settings that its searches found, so that a record grows where its runs are no longer.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from plan import FIRST_SEED, TASKS, Task
from rows import Stage

from seht.cli import main as seht
from seht.lab.methods.parse import read
from seht.lab.records import write
from seht.lab.report.load import DONE, load

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results" / "evidence"
_PLACE = re.compile(r"\{(?:(?P<task>[^{}:]+):)?(?P<key>[^{}=]+)(?:=(?P<option>\w+))?\}")
_KEPT = ("valid_top1", "valid_loss", "test_top1", "test_loss", "test_ece", "test_perplexity")
_CURVES = ("train_loss", "valid_loss", "valid_top1")


def path_of(name: str, records: Path) -> Path:
    """A task's record."""
    return records / f"{name}.json.xz"


def read_record(name: str, records: Path = RECORDS) -> dict[str, Any]:
    """What a task has left."""
    path = path_of(name, records)
    if not path.is_file():
        raise SystemExit(f"there is no {path}: run `make study TASK={name}` first")
    return json.loads(lzma.decompress(path.read_bytes()))


def chosen(record: dict[str, Any]) -> dict[str, str]:
    """The method of every row, with the settings that its search found."""
    return {key: m for stage in record["stages"].values() for key, m in stage["rows"].items()}


def filled(text: str, own: dict[str, str], records: Path) -> str:
    """A row with its places filled by what searches have chosen."""

    def one(found: re.Match[str]) -> str:
        task, key, option = found["task"], found["key"], found["option"]
        rows = own if task is None else chosen(read_record(task, records))
        if key not in rows:
            raise SystemExit(f"{text}: no row {key!r} has been chosen yet in {task or 'this task'}")
        if option is None:
            return rows[key]
        (options,) = read(rows[key]).values()
        return options[option]

    return _PLACE.sub(one, text)


def command_of(
    task: Task, stage: Stage, methods: list[str], seeds: int, first: int = FIRST_SEED
) -> list[str]:
    """The stage as arguments of ``seht``, without its directory."""
    search = ["--grid", "--grid-seeds", str(task.search_seeds)] if stage.grid else []
    return [
        *("compare", task.recipe, *task.options, "--methods", ",".join(methods)),
        *("--seeds", str(seeds), "--first-seed", str(first), *search),
        *(["--refit"] if stage.refit else []),
        *([] if stage.cost else ["--no-cost"]),
    ]


def only(task: Task, keys: list[str]) -> Task:
    """The task with some of its rows."""
    known = {key for stage in task.stages for key in stage.rows}
    if missing := set(keys) - known:
        raise SystemExit(f"no row {min(missing)!r} in this task; there are {', '.join(known)}")
    rows = [{key: text for key, text in stage.rows.items() if key in keys} for stage in task.stages]
    kept = [replace(s, rows=r) for s, r in zip(task.stages, rows, strict=True) if r]
    return replace(task, stages=tuple(kept))


def run(
    name: str, task: Task, seeds: int, more: list[str], runs: Path, records: Path
) -> dict[str, Any]:
    """All stages of a task; the record is packed after each of them."""
    record: dict[str, Any] = {}
    if path_of(name, records).is_file():
        record = read_record(name, records)
    stages: dict[str, Any] = record.get("stages", {})
    for stage in task.stages:
        own = chosen({"stages": stages})
        methods = [filled(text, own, records) for text in stage.rows.values()]
        command = command_of(task, stage, methods, seeds)
        out = runs / name / stage.name
        print(f"== {name}, {stage.name}: {len(methods)} rows, {seeds} seeds", flush=True)
        if code := seht([*command, "--out", str(out), *more]):
            raise SystemExit(code)
        stages[stage.name] = merged(stages.get(stage.name), packed(task, stage, command, out))
        record = {"task": name, "machine": machine(record), "seeds": seeds, "stages": stages}
        store(record, records)
    return record


def grow(
    name: str, task: Task, seeds: int, more: list[str], runs: Path, records: Path
) -> dict[str, Any]:
    """The seeds that rows of a record lack, with the settings that are in it."""
    record = read_record(name, records)
    for stage in task.stages:
        old = record["stages"].get(stage.name)
        if old is None:
            raise SystemExit(f"{name} has no stage {stage.name!r} yet: run it without --chosen")
        there = {key: len(old["runs"][key]) for key in stage.rows if key in old["rows"]}
        for count in sorted({count for count in there.values() if count < seeds}):
            rows = {key: old["rows"][key] for key, its in there.items() if its == count}
            part = replace(stage, rows=rows, grid=False)
            methods, first = list(rows.values()), FIRST_SEED + count
            command = command_of(task, part, methods, seeds - count, first)
            out = runs / name / f"{stage.name}-from-{first}"
            print(f"== {name}, {stage.name}: {len(rows)} rows, seeds from {first}", flush=True)
            if code := seht([*command, "--out", str(out), *more]):
                raise SystemExit(code)
            new = packed(task, part, command, out)
            new["runs"] = {key: old["runs"][key] | its for key, its in new["runs"].items()}
            # What made the table is the search's command; these seeds it would run, too.
            old = merged(old, new) | {"command": old["command"]}
            record["stages"][stage.name] = old
            record |= {"machine": machine(record), "seeds": max(seeds, record["seeds"])}
            store(record, records)
    return record


def store(record: dict[str, Any], records: Path) -> None:
    """Packed, in one go."""
    records.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, separators=(",", ":"))
    write(path_of(record["task"], records), lzma.compress(text.encode(), preset=9))


def packed(task: Task, stage: Stage, command: list[str], out: Path) -> dict[str, Any]:
    """What a stage has left, small."""
    found = load(out)
    rows = dict(zip(stage.rows, found.methods, strict=True))
    begun = min(path.stat().st_mtime for path in out.glob("runs/*/seed-*/config.json"))
    grid = out / "grid.json"
    searched = json.loads(grid.read_text()) if grid.is_file() else {}
    return {
        "command": shlex.join(["seht", *command]),
        "rows": rows,
        "refit": stage.refit,
        "classes": 2 if task.recipe.startswith(("cancer", "italy")) else 10,
        "begun": datetime.fromtimestamp(begun, timezone.utc).isoformat(timespec="seconds"),
        "versions": next(iter(found.runs.values())).versions,
        "cost": {key: found.costs[m] for key, m in rows.items() if m in found.costs},
        "searched": dict(zip(stage.rows, searched.get("runs", {}).values(), strict=False)),
        "candidates": searched.get("candidates", []),
        "runs": {
            key: {
                str(seed): _run(found.runs[method, seed], task.curves)
                for seed in found.seeds
                if (method, seed) in found.runs
            }
            for key, method in rows.items()
        },
    }


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Rows that were run at another time stay, and so do other seeds of the same row."""
    if old is None:
        return new
    there = {candidate["method"] for candidate in new["candidates"]}
    kept = [candidate for candidate in old["candidates"] if candidate["method"] not in there]
    both = {key: old[key] | new[key] for key in ("rows", "cost", "searched")}
    both["runs"] = old["runs"] | {
        key: (old["runs"].get(key, {}) if old["rows"].get(key) == new["rows"][key] else {}) | runs
        for key, runs in new["runs"].items()
    }
    begun = min(old["begun"], new["begun"])
    return {**new, **both, "candidates": kept + new["candidates"], "begun": begun}


def _run(record: Any, curves: bool) -> dict[str, Any]:
    if record.status != DONE:
        return {"failed": record.reason}
    result = record.result
    kept = {
        part: {key: _short(values[key]) for key in _KEPT if key in values}
        for part, values in result["metrics"].items()
    }
    kept |= {k: _short(result[k]) for k in ("seconds", "weight_norm", "train_loss")}
    kept["trace"] = _short((result["trace"] or {}).get("estimate"))
    if result.get("eigenvalues"):
        kept |= {"eigenvalues": result["eigenvalues"], "stability": result["stability"]}
    for state in (result.get("paths") or {}).values():
        kept["weight"] = _short(state["weights"][-1])
    if curves:
        kept["curves"] = {
            key: [_short(value) for value in record.curves[key]]
            for key in _CURVES
            if key in record.curves
        }
    return kept


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def machine(record: dict[str, Any]) -> dict[str, Any]:
    """What ran it, without names; after those that ran the record's rows before."""
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpus.read_text() if cpus.is_file() else "")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    before = record.get("machine", {})
    return {
        "processor": _later(before.get("processor"), model[1] if model else platform.machine()),
        "cores": os.cpu_count(),
        "commit": _later(before.get("commit"), commit),
    }


def _later(before: str | None, here: str) -> str:
    return here if not before else before if here in before else f"{before}, later {here}"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="+", choices=TASKS, metavar="TASK")
    parser.add_argument("--seeds", type=int, help="judging seeds (default: the plan's)")
    parser.add_argument("--rows", help="only these, with commas; the others can follow later")
    parser.add_argument("--stages", help="only these, with commas")
    parser.add_argument(
        "--chosen", action="store_true", help="search nothing: more seeds of what the record has"
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "study")
    parser.add_argument("--records", type=Path, default=RECORDS)
    given, more = parser.parse_known_args(arguments)
    for name in given.tasks:
        task = TASKS[name] if given.rows is None else only(TASKS[name], given.rows.split(","))
        if given.stages is not None:
            kept = tuple(s for s in task.stages if s.name in given.stages.split(","))
            task = replace(task, stages=kept)
        go = grow if given.chosen else run
        go(name, task, given.seeds or task.seeds, more, given.runs, given.records)


if __name__ == "__main__":
    main()
