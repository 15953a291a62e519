"""Whose a directory or a file is: what we have not written ourselves is not written over."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seht.lab.records import SUFFIX, RunError

RUN, COMPARISON = ("recipe", "method", "seed"), ("recipe", "methods", "seeds")
"""What ``config.json`` and ``comparison.json`` have in them."""


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
    if not ours and (found := _others(directory)):
        raise RunError(
            f"{directory} is no {kind}'s directory and not empty ({found[0]}); choose another one "
            "with --out, or remove it"
        )


def _others(directory: Path) -> list[str]:
    """What somebody else may have put there; hidden files and what a kill has left do not count."""
    try:
        names = sorted(place.name for place in directory.iterdir())
    except OSError:
        return []  # not there, or not to be read, which the next step says
    return [name for name in names if name[0] != "." and not name.endswith(SUFFIX)]


def _has(file: Path, keys: Iterable[str]) -> bool:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(key in found for key in keys)
