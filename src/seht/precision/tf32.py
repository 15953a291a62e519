"""Whether products and convolutions of float32 are computed with fewer bits than float32 has."""

from __future__ import annotations

import torch

from seht.tensors.process import PRODUCTS

_DEVICES = {"cuda": "cuda", "mkldnn": "cpu"}


def shortened(kinds: set[str]) -> torch.dtype | None:
    """How float32 products are shortened on these devices: float16 for TF32, bfloat16, or None."""
    old, new = PRODUCTS.read()
    found = {value for (backend, _), value in new.items() if _DEVICES[backend] in kinds}
    if not new and old is not None:  # an older PyTorch
        matmul, *tf32 = old
        if "cuda" in kinds and any(tf32):
            found.add("tf32")
        if "cpu" in kinds and matmul == "medium":
            found.add("bf16")
    if "bf16" in found:
        return torch.bfloat16
    return torch.float16 if "tf32" in found else None
