"""Several processes that train one model: the interface, and a file for each kind of wrapper.

``ranks.py`` is the interface, and one process alone; ``ddp.py`` (with ``detour.py``) and
``fsdp.py`` (with ``shards.py`` and ``fsdp_passes.py``) are the kinds of wrapper that we know. A new
kind is a file with a subclass of :class:`Ranks` and a place in :data:`KINDS`. For the engines, the
penalty and what is above them.
"""

from __future__ import annotations

from torch import nn

from seht.distributed.ddp import DDPRanks
from seht.distributed.fsdp import FSDPRanks
from seht.distributed.ranks import LOCAL, Ranks, grouped

__all__ = ["KINDS", "LOCAL", "Ranks", "ranks_of", "unwrapped"]

KINDS: list[type[Ranks]] = [FSDPRanks, DDPRanks]
"""The kinds of wrapper; the first whose ``find`` recognises a model is used for it."""


def ranks_of(model: nn.Module, before: Ranks | None = None) -> Ranks:
    """The processes that train the model now; ``before`` is what the last call got."""
    together = grouped()
    for kind in KINDS:
        found = kind.find(model, before) if together or not kind.in_group else None
        if found is not None:
            return found
    return LOCAL


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrappers."""
    wrappers = tuple(kind.wrapper for kind in KINDS if kind.wrapper is not None)
    while isinstance(model, wrappers):
        model = model.module  # type: ignore[assignment]
    return model
