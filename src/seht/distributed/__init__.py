"""Several processes that train one model: the interface, and a file for each kind of wrapper.

``ranks.py`` is the interface, and one process alone; ``ddp.py`` (with ``detour.py``) and
``fsdp.py`` (with ``shards.py`` and ``fsdp_passes.py``) are the kinds of wrapper that we know. A new
kind is a file with a subclass of :class:`Ranks` and a place in :data:`KINDS`. For the engines, the
penalty and what is above them.
"""

from __future__ import annotations

from seht.distributed.ddp import DDPRanks
from seht.distributed.fsdp import FSDPRanks
from seht.distributed.ranks import KINDS, LOCAL, Ranks, ranks_of, unwrapped

__all__ = ["KINDS", "LOCAL", "Ranks", "ranks_of", "unwrapped"]

KINDS += [FSDPRanks, DDPRanks]
