"""Whether products and convolutions of float32 are computed with fewer bits than float32 has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OPERATIONS = [(b, op) for b in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
_get_new = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_new: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
# The attribute of torch.backends.cudnn refuses after torch.backends.disable_global_flags().
_set_cudnn = torch._C._set_cudnn_allow_tf32


def shortened(kinds: set[str]) -> torch.dtype | None:
    """How float32 products are shortened on these devices: float16 for TF32, bfloat16, or None."""
    found: set[str] = set()
    if _get_new is not None:
        for backend, operation in _OPERATIONS:
            if {"cuda": "cuda", "mkldnn": "cpu"}[backend] in kinds:
                found.add(_get_new(backend, operation))
    else:
        if "cuda" in kinds and (
            torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        ):
            found.add("tf32")
        if "cpu" in kinds and torch.get_float32_matmul_precision() == "medium":
            found.add("bf16")
    if "bf16" in found:
        return torch.bfloat16
    return torch.float16 if "tf32" in found else None


@contextmanager
def unshortened() -> Iterator[None]:
    """Products and convolutions of float32 are computed in float32 while the block runs.

    PyTorch has two ways to say that, of which the older raises once the newer was used. The
    settings are the process's: another thread runs unshortened meanwhile, too.
    """
    known = [] if _get_new is None else [(place, _get_new(*place)) for place in _OPERATIONS]
    try:
        matmul = torch.get_float32_matmul_precision()
        cublas = torch.backends.cuda.matmul.allow_tf32
        cudnn = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        try:
            for place in _OPERATIONS:
                _set_new(*place, "ieee")
            yield
        finally:
            for place, value in known:
                _set_new(*place, value)
        return
    try:
        torch.set_float32_matmul_precision("highest")
        _set_cudnn(False)
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        if torch.backends.cuda.matmul.allow_tf32 != cublas:
            torch.backends.cuda.matmul.allow_tf32 = cublas
        _set_cudnn(cudnn)
        for place, value in known:  # the older way sets several at once
            if _get_new is not None and _get_new(*place) != value:
                _set_new(*place, value)
