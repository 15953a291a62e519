"""Training frameworks: the penalty in their loggers and in their checkpoints.

The penalty itself needs none of this: it is one scalar and one backward wherever a loss is
computed. Nothing here is imported by ``import seht``, and each module imports its framework when it
is imported itself: :mod:`seht.integrations.lightning`, :mod:`seht.integrations.huggingface`. A
plain loop, Fabric and Accelerate need :func:`log_values` alone.
"""

from __future__ import annotations

from seht.guards import warn
from seht.penalty import HessianTrace

__all__ = ["check_accumulation", "log_values"]


def log_values(penalty: HessianTrace, prefix: str = "seht/") -> dict[str, float]:
    """What the penalty's last call did, by name, for any logger; nothing before the first call.

    ``loss`` is the loss without the penalty, ``share`` the size of the penalty over that of the
    loss. ``trace`` is there on penalised steps only, ``error`` where the engine knows it.

    Example:
        ```python
        from seht.integrations import log_values

        penalty(lambda: loss_fn(model, batch))
        print(log_values(penalty))
        ```
    """
    last = penalty.last
    if last is None:
        return {}
    values = {
        "loss": last.loss,
        "trace": last.trace,
        "penalty": last.penalty,
        "share": abs(last.penalty / last.loss) if last.loss else None,
        "weight": last.weight,
        "error": last.error,
    }
    return {prefix + name: value for name, value in values.items() if value is not None}


def check_accumulation(penalty: HessianTrace, batches: int) -> None:
    """Warn where the framework's optimiser step is not the penalty's."""
    if batches != penalty.accumulate:
        warn(
            f"seht: the trainer accumulates {batches} batches in a step, the penalty "
            f"{penalty.accumulate}, so that warmup, every and ramp count something else than "
            f"optimiser steps; build it with HessianTrace(..., accumulate={batches})"
        )
