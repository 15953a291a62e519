"""Refuses to write into directories and over files that are not ours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seht.lab.records import SUFFIX, RunError

RUN, COMPARISON = ("recipe", "method", "seed"), ("recipe", "methods", "seeds")
"""The keys by which our ``config.json`` and ``comparison.json`` are recognised."""


def check_run(directory: Path) -> None:
    """Raise unless the directory is a run's, empty, or not there."""
    ours = _has(directory / "config.json", RUN) or any(directory.glob("events.out.tfevents.*.seht"))
    _check(directory, ours, "run")


def check_comparison(directory: Path) -> None:
    """Raise unless the directory is a comparison's, empty, or not there."""
    parts = [place for kind in ("runs", "grid") for place in directory.glob(f"{kind}/*/seed-*")]
    runs = any(_has(place / "config.json", RUN) for place in parts)
    _check(directory, runs or _has(directory / "comparison.json", COMPARISON), "comparison")


def _check(directory: Path, ours: bool, kind: str) -> None:
    found = None if ours else _foreign(directory)
    if found is not None:
        raise RunError(
            f"{directory} is no {kind}'s directory and not empty ({found}); choose another one "
            "with --out, or remove it"
        )


def _foreign(directory: Path) -> Path | None:
    """A file that somebody else may have put there; hidden ones, and what a kill has left, are no
    such.
    """
    for place in directory.rglob("*"):
        name = place.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and place.suffix != SUFFIX and not place.is_dir():
            return name
    return None


def _has(file: Path, keys: Iterable[str]) -> bool:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(key in found for key in keys)
