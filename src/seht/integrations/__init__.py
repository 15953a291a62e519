"""Adapters that put the penalty into a framework's logger and checkpoints.

The penalty itself works in any framework, because it is one scalar and one backward pass. ``import
seht`` imports nothing of this; :mod:`seht.integrations.lightning` and
:mod:`seht.integrations.huggingface` import their framework. A plain loop, Fabric and Accelerate
need only :func:`log_values`, and :func:`training` around the loop. Nothing else of ours imports
from here.
"""

from __future__ import annotations

from seht.integrations.length import training
from seht.penalty import HessianTrace

__all__ = ["log_values", "training"]


def log_values(penalty: HessianTrace, prefix: str = "seht/") -> dict[str, float]:
    """The numbers of the penalty's last call by name, for any logger; empty before the first call.

    ``loss`` is the loss without the penalty, ``penalty`` what was added to it,
    ``penalty_over_loss`` the absolute value of their ratio (``share=`` is another one, that of
    gradients) and ``weight`` the weight that was applied. ``trace`` is there on penalised steps
    only, ``error`` (the relative numerical error of the trace's gradient) if the engine knows it.
    The call costs nothing.

    Args:
        penalty: the penalty.
        prefix: put before each name.

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
        "penalty_over_loss": abs(last.penalty / last.loss) if last.loss else None,
        "weight": last.weight,
        "error": last.error,
    }
    return {prefix + name: value for name, value in values.items() if value is not None}
