"""Random generators of one's own, so that data never depends on the global random state."""

from __future__ import annotations

import hashlib

import torch


def generator(*what: int | str) -> torch.Generator:
    """A generator for this purpose: any change of seed, name or epoch gives an unrelated one."""
    made = hashlib.sha256(repr(what).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(made[:8], "big", signed=True))
