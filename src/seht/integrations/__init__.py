"""Adapters that put the penalty into a framework's logger and checkpoints.

The penalty itself works in any framework, because it is one scalar and one backward pass. ``import
seht`` imports nothing of this; :mod:`seht.integrations.lightning` and
:mod:`seht.integrations.huggingface` import their framework. A plain loop, Fabric and Accelerate
need only :func:`log_values`, and :func:`training` around the loop. Nothing else of ours imports
from here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from seht.errors import check_count, check_positive, warn
from seht.penalty import HessianTrace
from seht.strength.held_out import length_of

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


def training(
    penalty: HessianTrace,
    loader: Any = None,
    epochs: float | None = None,
    *,
    steps: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    held_out: Any = None,
) -> HessianTrace:
    """Tells the penalty of a loop by hand what an adapter would, and returns it, for ``with``.

    A plain loop, Accelerate and Fabric have no trainer that knows how long the training is. This
    fills in ``total_steps``, and the optimiser and held-out examples if they are given. At the end
    of the ``with`` block you are warned if nothing was penalised. It costs nothing.

    Example:
        ```python
        from seht.integrations import training

        penalty = seht.HessianTrace(model, warmup=0.1)
        with training(penalty, loader, epochs=4, optimizer=optimizer):
            for epoch in range(4):
                for x, y in loader:
                    optimizer.zero_grad()
                    penalty(lambda: F.cross_entropy(model(x), y)).backward()
                    optimizer.step()
        ```

    Args:
        penalty: the penalty that the loop calls once for each batch.
        loader: what the loop reads, of this process: the loader that ``accelerator.prepare`` or
            ``fabric.setup_dataloaders`` returned. Its length and the penalty's ``accumulate`` make
            the number of optimiser steps; with Accelerate both counts are compared.
        epochs: how often it is read in the whole training, also if this part of it is resumed.
        steps: the number of optimiser steps, in place of ``loader`` and ``epochs``.
        optimizer: for a share or a tuned weight; the one that was returned.
        held_out: tunes a weight that was not given: ``(batches, loss_fn)``.
    """
    if not isinstance(penalty, HessianTrace):
        raise TypeError(
            "training is given the seht.HessianTrace of the loop and then the loader, as in "
            f"training(penalty, loader, epochs=3), not {type(penalty).__name__}"
        )
    total = _steps(penalty, loader, epochs, steps)
    penalty.equip(held_out=held_out, optimizer=optimizer)
    penalty.lasts(total)
    together = getattr(getattr(loader, "gradient_state", None), "num_steps", None)
    if together is not None:  # Accelerate's own
        check_accumulation(penalty, together)
    given = penalty.schedule.total_steps
    if given != total:
        warn(
            f"seht: the penalty was made with total_steps={given}, and this training has {total} "
            "optimiser steps; leave total_steps= out, it is filled in here"
        )
    return penalty


def _steps(penalty: HessianTrace, loader: Any, epochs: float | None, steps: int | None) -> int:
    if steps is not None:
        if loader is not None or epochs is not None:
            raise TypeError("give the loader and epochs=, or steps=, not both")
        check_count("steps", steps)
        return steps
    if loader is None or epochs is None:
        raise TypeError(
            "training needs the loader and how often it is read, epochs=, or the number of "
            "optimiser steps, steps="
        )
    check_positive("epochs", epochs)
    batches = length_of(loader)
    if batches == 0:
        raise ValueError(
            "the length of this loader is 0 or not known; give the number of optimiser steps, "
            "steps=, in place of the loader and epochs="
        )
    return math.ceil(math.ceil(batches * epochs) / penalty.accumulate)


def check_accumulation(penalty: HessianTrace, batches: int) -> None:
    """Warn if framework and penalty accumulate different numbers of batches in a step."""
    if batches != penalty.accumulate:
        warn(
            f"seht: the trainer accumulates {batches} batches in a step, the penalty "
            f"{penalty.accumulate}, so that warmup, every and ramp count something else than "
            f"optimiser steps; build it with HessianTrace(..., accumulate={batches})"
        )


def counted(updates: int, batches: int, together: int, accumulate: int) -> int:
    """The number of steps that the penalty counts during so many optimiser steps.

    It counts ``accumulate`` calls as one step. A framework that accumulates ``together`` batches
    steps early at the end of an epoch of ``batches``, if fewer are left.
    """
    epochs, rest = divmod(updates, math.ceil(batches / together))
    return math.ceil((epochs * batches + rest * together) / accumulate)


def tell_length(penalty: HessianTrace, updates: float, batches: float, together: int) -> None:
    """Tell the penalty how many steps it will count, where the framework knows it."""
    if not 0 < updates < math.inf:
        return
    steps = int(updates)
    if 0 < batches < math.inf:
        steps = counted(steps, int(batches), together, penalty.accumulate)
    penalty.lasts(steps)
