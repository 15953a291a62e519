"""Several processes that train one model: which one writes, and which examples each has.

Started by ``torchrun``, or by Fabric itself where more than one device is asked for. The first rank
leads: it alone reads and writes the run's records. Everything drawn for a batch is drawn for the
whole of it on every rank, each then takes its share, so that a step sees the same examples however
many ranks there are. A method whose random numbers are drawn in the forward pass (dropout) draws
others on every rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from seht.errors import one_line
from seht.lab.methods.base import Batch
from seht.lab.records import RunError
from seht.tensors.trees import mapped

T = TypeVar("T")


class FabricRanks:
    """This process among those that train together; alone, it does what it is asked at once."""

    def __init__(self, fabric: Any) -> None:
        self.fabric = fabric
        self.rank, self.count = int(fabric.global_rank), int(fabric.world_size)

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def lead(self, function: Callable[[], T]) -> T:
        """Run the function on the first rank; return its result, or raise its error, on all."""
        if self.count == 1:
            return function()
        said: tuple[Any, Exception | None] = (None, None)
        if self.leads:
            try:
                said = (function(), None)
            except Exception as error:
                self.fabric.broadcast((None, error))
                self.leave()
                raise
        value, raised = self.fabric.broadcast(said)
        if raised is not None:
            self.leave()
            raise raised
        return value

    def any(self, true: bool) -> bool:
        """Whether it is true on the first rank, whose clock decides."""
        if self.count == 1:
            return true
        flag = torch.tensor(float(true and self.leads), device=self.fabric.device)
        return bool(self.fabric.all_reduce(flag, reduce_op="sum").item())

    def total(self, values: Iterable[float | Tensor]) -> list[float]:
        """Sums over the ranks, in float64."""
        found = [torch.as_tensor(value, dtype=torch.float64).to(self.fabric.device)
                 for value in values]  # fmt: skip
        together = torch.stack(found)
        if self.count > 1:
            together = self.fabric.all_reduce(together, reduce_op="sum")
        numbers: list[float] = together.tolist()
        return numbers

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order; on ranks that do not lead it may be empty."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        # As bytes on the host: objects would be unpickled onto the devices they came from.
        found: list[Any] = [None] * self.count
        dist.gather_object(
            mapped(value, lambda tensor: tensor.detach().cpu()), found if self.leads else None
        )
        return found if self.leads else []

    def share(self, batch: Batch) -> tuple[Batch, float]:
        r"""This rank's examples, and what their mean counts for in the mean over ranks.

        .. math:: \frac1N \sum_i \ell_i = \frac1R \sum_r \frac{R n_r}{N} \bar\ell_r

        Images are cut along the batch, text between streams. A rank for which nothing is left
        takes one example that counts for nothing: it has to take part.
        """
        if self.count == 1:
            return batch, 1.0
        axis = batch.y.dim() - 1
        whole = batch.y.shape[axis]
        cuts = [whole * r // self.count for r in range(self.count + 1)]
        first, last = cuts[self.rank], cuts[self.rank + 1]
        weight = (last - first) * self.count / whole
        if first == last:
            first, last = 0, 1

        parts = {"x": batch.x, "y": batch.y, "other": batch.other}
        own = mapped(parts, lambda tensor: tensor.narrow(axis, first, last - first))
        return replace(batch, **own), weight

    def leave(self) -> None:
        """Wait for the others: no rank may be gone while one still speaks.

        The group stays until the process ends. Destroyed here it would go with the model's wrapper,
        and its destructor waits, with Python's lock in its hands, for a thread that may need it.
        """
        if self.count > 1:
            self.fabric.barrier()


def join(device: str, devices: int, precision: Any) -> FabricRanks:
    """Find the other ranks, or start them; ``devices`` is what ``torchrun`` says where it did."""
    from lightning_fabric import Fabric

    nodes = 1
    if under_torchrun():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if devices not in (1, here):
            raise RunError(
                f"--devices {devices} under torchrun with {here} processes; leave --devices out"
            )
        devices, nodes = here, int(os.environ["WORLD_SIZE"]) // here
    if devices * nodes == 1:
        return single(device, precision)
    cores = os.cpu_count() or 1
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if on_cpu and devices > max(16, 2 * cores):  # each is a process of its own
        raise RunError(f"--devices {devices} on a machine with {cores} processors; ask for fewer")
    import logging

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    try:
        fabric = Fabric(
            accelerator=device,
            devices=devices,
            num_nodes=nodes,
            strategy="ddp",
            precision=precision,
        )
    except Exception as error:  # more devices than there are, or none of that name
        raise RunError(one_line(error)) from error
    if under_torchrun() and not torch.distributed.is_initialized():
        _meet(fabric.device)
    fabric.launch()
    return FabricRanks(fabric)


def _meet(device: torch.device) -> None:
    """Form the process group of this attempt.

    The agent's store outlives a restart, and holds the addresses of processes that are gone: each
    attempt writes below a name of its own.
    """
    dist: Any = torch.distributed  # not all of what it documents is declared
    store, rank, size = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore(f"seht-{attempt}", store),
        rank=rank,
        world_size=size,
        device_id=device if cuda else None,
    )
    if cuda:
        atexit.register(dist.destroy_process_group)  # NCCL asks for it


def single(device: str, precision: Any) -> FabricRanks:
    """This process alone."""
    from lightning_fabric import Fabric

    try:
        return FabricRanks(Fabric(accelerator=device, devices=1, precision=precision))
    except Exception as error:  # what Fabric says to a device that is not there depends on which
        raise RunError(f"--device {device}, --precision {precision}: {one_line(error)}") from error


def under_torchrun() -> bool:
    """Whether an elastic agent has started this process."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def leads() -> bool:
    """Whether this process is the first rank, from the environment, before the ranks have met."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == 0
