"""Which epoch of a run is the best, on the validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def score(row: Mapping[str, Any]) -> tuple[float, float]:
    """The score of an epoch: accuracy, then a small loss; for text a small loss."""
    return (row.get("valid_top1") or 0.0, -row["valid_loss"])


def since_best(rows: Sequence[Mapping[str, Any]]) -> int:
    """Epochs after the best one so far; of equals the first counts."""
    if not rows:
        return 0
    scores = [score(row) for row in rows]
    return len(rows) - 1 - scores.index(max(scores))
