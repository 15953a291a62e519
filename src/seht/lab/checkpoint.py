"""A run's state in one file, which is refused if it is incomplete, altered or another run's.

The file is one line of text (a magic word, the SHA-256 of what follows, the fingerprint of the
run's configuration) and then what ``torch.save`` writes. The digest is checked before anything is
unpickled, and only tensors and plain values are (``weights_only=True``).
"""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from seht.lab.records import RunError, write

MAGIC = "seht-checkpoint-1"


def save(path: Path, state: dict[str, Any], run: str) -> None:
    """Write the state of the run with that fingerprint."""
    # To memory first: torch's own writer reports a full disk as a RuntimeError without a cause.
    data = to_bytes(state)
    write(path, f"{MAGIC} {hashlib.sha256(data).hexdigest()} {run}\n".encode() + data)


def load(path: Path, run: str, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """The state of the run with that fingerprint; ``None`` where there is no file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    head, _, data = content.partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if len(words) != 3 or words[0] != MAGIC:
        raise RunError(
            f"{path} is not a checkpoint of this version of seht; remove it to start the run again"
        )
    if words[1] != hashlib.sha256(data).hexdigest():
        raise RunError(
            f"{path} is cut short or altered (its SHA-256 is not the one it was written with); "
            "remove it to start the run again"
        )
    if words[2] != run:
        raise RunError(
            f"{path} belongs to a run with another recipe, method or seed; remove it, or choose "
            "another directory with --out"
        )
    try:
        return torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise RunError(
            f"{path} holds more than tensors and plain values, which is not loaded; remove it to "
            "start the run again"
        ) from error


def to_bytes(state: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
