"""Directories of runs: what is not ours is not touched, and one process at a time works in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seht.commands.files import SUFFIX
from seht.lab.records import RunError, loads, writing

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
            f"{directory} is not the directory of a {kind}, and not empty ({found}); choose a new "
            "one with --out"
        )


def _foreign(directory: Path) -> Path | None:
    """A file that somebody else may have put there; not hidden ones, or what a kill has left."""
    for place in directory.rglob("*"):
        name = place.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and place.suffix != SUFFIX and not place.is_dir():
            return name
    return None


def _has(file: Path, keys: Iterable[str]) -> bool:
    try:
        found = loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(key in found for key in keys)


def lock_of(directory: Path) -> Path:
    """The file whose lock a directory's one process holds."""
    return directory / ".lock"


@contextmanager
def alone(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Make the directory and keep others out of it; wait ``patience`` seconds for them to leave.

    The system lets go of the lock when its holder dies.
    """
    from filelock import FileLock, Timeout

    new = [place for place in (directory, *directory.parents) if not place.exists()]
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_of(directory))
        try:
            lock.acquire(timeout=patience)
        except Timeout:
            raise RunError(
                f"another process is working in {directory}; wait until it ends, or choose another "
                "directory with --out"
            ) from None
    try:
        yield
    finally:
        if new and [file.name for file in directory.iterdir()] == [".lock"]:
            lock_of(directory).unlink()  # what failed at once leaves no trace
            with suppress(OSError):
                for place in new:
                    place.rmdir()
        lock.release()
