"""What a tensor looks at: its memory, and how often that was written into."""

from __future__ import annotations

import torch
from torch import Tensor


def version(tensor: Tensor) -> int:
    """How often a tensor was written into; inference tensors do not count."""
    return -1 if tensor.is_inference() else tensor._version


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that a view looks at, or the tensor itself."""
    base = None if tensor.is_inference() else tensor._base
    return tensor if base is None else base


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one is a view or an alias of the other."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]
