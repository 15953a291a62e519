"""Whether other processes take part, and which modules would mix their examples with ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from seht.task import name_of


def grouped() -> bool:
    """Whether this process belongs to a group, without which there is no DDP."""
    return dist.is_available() and dist.is_initialized()


def refuse_parallel(modules: Sequence[nn.Module]) -> None:
    """Refuse modules that couple devices or ranks within a pass."""
    for module in modules:
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise RuntimeError(
                f"{_told(module, modules)} is a DataParallel on {len(module.device_ids)} devices, "
                "whose replicas run in threads that no decision can be frozen in; use "
                "DistributedDataParallel, one process for each device"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training and _ranks_of(module) > 1:
            raise RuntimeError(
                f"{_told(module, modules)} is a SyncBatchNorm, which mixes the examples of all "
                "ranks while every rank probes a direction of its own; use BatchNorm, whose "
                "statistics are each rank's own, or put this layer into evaluation mode on "
                "penalised steps"
            )


def _told(module: nn.Module, modules: Sequence[nn.Module]) -> str:
    name = name_of(module, modules)
    return repr(name) if name else "the model"


def _ranks_of(module: nn.SyncBatchNorm) -> int:
    return dist.get_world_size(module.process_group) if grouped() else 1
