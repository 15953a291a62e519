"""One process at a time in a directory; the system lets go of the lock when its holder dies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seht.lab.records import RunError, writing


@contextmanager
def alone(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Make the directory and keep others out of it; wait ``patience`` seconds for them to leave."""
    from filelock import FileLock, Timeout

    new = not directory.exists()
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / ".lock")
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
        if new and {file.name for file in directory.iterdir()} <= {".lock"}:
            shutil.rmtree(directory, ignore_errors=True)  # what failed at once leaves no trace
        lock.release()
