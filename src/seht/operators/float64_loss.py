r"""Losses of confident predictions, in float64.

Where a network is sure, the gradient of its loss in the logits, :math:`p_y - 1`, is the small
difference of two numbers near 1, and float32 keeps few digits of it. A difference of gradients
divides what is lost by the step, twice: on an MLP trained to a loss of 1e-5 the gradient of the
trace was off by a third at the step that the engine chose, and by 2 % at the best one; with the
loss alone in float64 it is by some tenths of a percent. A few logits cost nothing; where they are
many, as a language model's are, the loss stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seht.operators.rules import Mode, untaped

MOST = 1 << 16
"""The most logits for which float64 does not slow a step down noticeably."""


def _double(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if floating else value


def _small(logits: Tensor) -> bool:
    # Apple's GPUs have no float64.
    return logits.dtype == torch.float32 and logits.numel() <= MOST and logits.device.type != "mps"


def _run(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    logits = args[0] if args else kwargs.get("input")
    if not (isinstance(logits, Tensor) and _small(logits)):
        return func(*args, **kwargs)
    wide = {name: _double(value) for name, value in kwargs.items()}
    return func(*map(_double, args), **wide).to(logits.dtype)


DOUBLE = untaped(_run)
