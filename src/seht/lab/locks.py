"""One process at a time in a directory; the system lets go of the lock when its holder dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seht.lab.records import RunError, writing


def lock_of(directory: Path) -> Path:
    """The file whose lock a directory's one process holds."""
    return directory / ".lock"


@contextmanager
def alone(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Make the directory and keep others out of it; wait ``patience`` seconds for them to leave."""
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
