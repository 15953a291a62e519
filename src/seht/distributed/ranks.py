"""Several processes, one model: what the ranks of a DDP run have in common, and what not.

The penalised loss of a DDP run is the mean of the ranks' own, each with its own batch and probes,
as every gradient of DDP is. Two things must be the same everywhere, or a rank would wait for
another: which layers SEHT-D draws (a step without a penalty costs a third of one with it), and
whether a step fails. So rank 0's seed is everybody's, the rank counts as a further call of the step
(:func:`seht.probes.call_seed`), and a value that is not finite on one rank is news for all.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seht.distributed import ddp as wrappers
from seht.distributed.ddp import Detour, joins
from seht.record import NonFiniteError
from seht.replay.groups import grouped

_MASK64 = (1 << 64) - 1


class Ranks:
    """Which DDP wrappers hold the model, and this process's place among their ranks.

    Nothing is sent to other processes before a wrapper is known: a process group may serve
    something else, and a model that is not wrapped is trained by this process alone.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._world: weakref.ref[Any] | None = None
        self._known: list[weakref.ref[DistributedDataParallel]] = []
        self._shared = False
        self.rank, self.size = 0, 1

    def __reduce__(self) -> Any:
        """A copy finds its own wrappers."""
        return Ranks, ()

    @property
    def known(self) -> list[DistributedDataParallel]:
        """The wrappers that are still alive."""
        return [ddp for ref in self._known if (ddp := ref()) is not None]

    def look(self, model: nn.Module) -> None:
        """Find the wrappers: on the first call in a process group, or where all have gone."""
        if not grouped():
            if self._world is not None:
                self._forget()
            return
        world = dist.group.WORLD
        if self._world is None or self._world() is not world:
            self._forget()
            self._world = weakref.ref(world)
        elif not self._known or self.known:
            inside = wrappers.active()
            if inside is not None:
                self.meet([inside], model)
            return
        self._known = [weakref.ref(ddp) for ddp in find(model)]

    def meet(self, called: list[DistributedDataParallel], model: nn.Module) -> None:
        """Remember wrappers of the model that were not there before."""
        known = self.known
        for ddp in called:
            if not any(ddp is other for other in known) and _hold(ddp, model):
                self._known.append(weakref.ref(ddp))

    def share(self, seed: int, calls: int) -> int:
        """Rank 0's seed, asked for once; before the layers are drawn, as that must not differ."""
        known = self.known
        if self._shared or not known:
            return seed
        ddp = known[0]
        group = ddp.process_group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        mine = torch.tensor([_signed(seed), calls], dtype=torch.int64, device=ddp.device)
        all_ = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_, mine, group=group)
        rows = torch.stack(all_).tolist()
        counts = [row[1] for row in rows]
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"the ranks are at different calls of the penalty ({counts}); load states that "
                "were saved at the same step, or rank 0's state on every rank"
            )
        self._shared = True
        return int(rows[0][0]) & _MASK64

    def reset(self) -> None:
        """Ask again: the seed has been replaced."""
        self._shared = False

    def number(self, call: int) -> int:
        """The place of this rank's call among all those of the step."""
        return call * self.size + self.rank

    def detour(self, *, lean: bool) -> Detour:
        """The way past the wrappers."""
        return Detour(self.known, lean=lean)

    def told(self, loss: Any, model: nn.Module) -> Any:
        """The loss, ready to be differentiated inside the forward pass of a wrapper."""
        inside = wrappers.active()
        if inside is None or not _hold(inside, model):
            return loss
        return wrappers.told(inside, loss)

    def check_finite(self, loss: float, trace: float, step: int, *, raising: bool) -> None:
        """Raise here what another rank is about to raise: it would be waited for in vain."""
        known = self.known
        if not self._shared or not known or any(joins(ddp) for ddp in known):
            return
        own = 2 if not math.isfinite(loss) else int(not math.isfinite(trace))
        worst = torch.tensor([own], device=known[0].device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=known[0].process_group)
        found = int(worst.item())
        if found > own and (found == 2 or raising):
            what = "loss" if found == 2 else "trace estimate"
            raise NonFiniteError(
                f"the {what} of another rank is not finite at step {step}, and this rank stops "
                "with it; that rank's message says what to do"
            )


def find(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers inside the model, or else those around it, in the order of its weights.

    A module does not know what it is wrapped in, so all living objects are asked (some 50 ms,
    once): with the inner module in its hands the penalty would otherwise find out when the closure
    runs, and the layers have been drawn by then.
    """
    found = wrappers.wrappers_in(model)
    if not found:
        living = gc.get_objects()
        kinds = {kind for kind in set(map(type, living)) if DistributedDataParallel in kind.__mro__}
        found = [each for each in living if type(each) in kinds] if kinds else []
    places = {id(p): i for i, p in enumerate(model.parameters())}
    held = [(ddp, [places[id(p)] for p in _weights(ddp) if id(p) in places]) for ddp in found]
    return [ddp for ddp, at in sorted(held, key=lambda pair: pair[1]) if at]


def _weights(ddp: DistributedDataParallel) -> list[Any]:
    return getattr(ddp, "_module_parameters", [])  # none in one whose construction failed


def _hold(ddp: DistributedDataParallel, model: nn.Module) -> bool:
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for p in _weights(ddp))


def _signed(seed: int) -> int:
    """A seed as the int64 that has its bits; only these count (:func:`seht.probes.mix`)."""
    seed &= _MASK64
    return seed - (1 << 64) if seed >> 63 else seed
