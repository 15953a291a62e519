"""``DistributedDataParallel``: what its ranks share, and what each has for itself.

The penalised loss of a DDP run is the mean of the ranks' own, each with its own batch and probes,
because DDP averages gradients. Two things must be the same on all ranks, or one would wait for
another: which layers SEHT-D draws (a step without a penalty costs a third of one with it), and
whether a step fails. So all ranks use rank 0's seed, with their number mixed in as a further call
of the step (:func:`seht.probes.call_seed`), and tell each other of a value that is not finite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seht.distributed.detour import Detour, active, joins, told
from seht.distributed.ranks import Ranks, broadcast
from seht.errors import NonFiniteError

_MASK64 = (1 << 64) - 1


class DDPRanks(Ranks):
    """A process group, the wrappers in it that hold the model, and this process's place.

    A wrapper is known if it is a part of the model, if the penalty is called inside it, or once a
    closure has called it. Nothing is sent to other processes before one is known: a process group
    may serve something else, and a model that is not wrapped is trained by this process alone.
    """

    wrapper = DistributedDataParallel
    in_group = True

    def __init__(self, model: nn.Module) -> None:
        self._world = weakref.ref(dist.group.WORLD)
        self._model = model
        self._known: list[weakref.ref[DistributedDataParallel]] = []
        self._agreed = False
        self.rank, self.size = 0, 1
        self.meet(m for m in model.modules() if isinstance(m, DistributedDataParallel))

    @classmethod
    def find(cls, model: nn.Module, before: Ranks | None) -> Ranks | None:
        """Ranks in every process group: only the closure may show which wrapper holds the model."""
        found = before if isinstance(before, DDPRanks) and before._lasts(model) else cls(model)
        inside = active()
        found.meet([] if inside is None else [inside])
        return found

    def _lasts(self, model: nn.Module) -> bool:
        """Whether model and group are the same, and some of the known wrappers still exist."""
        same = model is self._model and self._world() is dist.group.WORLD
        return same and bool(self.known or not self._known)

    @property
    def known(self) -> list[DistributedDataParallel]:
        """The wrappers that are still alive."""
        return [ddp for ref in self._known if (ddp := ref()) is not None]

    def meet(self, wrappers: Iterable[DistributedDataParallel]) -> None:
        """Remember the wrappers that hold weights of the model."""
        for ddp in wrappers:
            if self._holds(ddp) and not any(ddp is other for other in self.known):
                self._known.append(weakref.ref(ddp))

    def _holds(self, ddp: DistributedDataParallel) -> bool:
        own = {id(p) for p in self._model.parameters()}
        return any(id(p) in own for p in ddp._module_parameters)

    # --- numbers ------------------------------------------------------------------------------

    def agree(self, value: Any) -> Any:
        """Rank 0's value, once a wrapper is known."""
        known = self._all_there()
        return broadcast(value, known[0].process_group, known[0].device) if known else value

    def mean(self, values: Tensor) -> Tensor:
        """The ranks' average, once a wrapper is known."""
        known = self._all_there()
        if not known:
            return values
        group = known[0].process_group
        total = values.detach().to(known[0].device, torch.float64, copy=True)
        dist.all_reduce(total, group=group)
        return (total / dist.get_world_size(group)).to(values)

    def averaged(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """DDP's mean."""
        return [self.mean(part) for part in parts]

    def products(self, found: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """The average over ranks, for which all of them must take part."""
        if self.known and not self._all_there():
            raise RuntimeError(
                "share= and weight='tuned' take one weight for all ranks, and inside ddp.join() a "
                "rank may have left; give the ranks equally many batches, or a weight= of your own"
            )
        return super().products(found, leaves)

    def _all_there(self) -> list[DistributedDataParallel]:
        """The known wrappers; none inside ``join()``, where ranks may miss what we send."""
        known = self.known
        return [] if any(joins(ddp) for ddp in known) else known

    def seed(self, seed: int, calls: int) -> int:
        """Rank 0's seed; the ranks must be at the same call."""
        known = self.known
        if self._agreed or not known:
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
        self._agreed = True
        return int(rows[0][0]) & _MASK64

    def state(self) -> int | None:
        """The number of ranks, once they have agreed."""
        return self.size if self._agreed else None

    def reset(self, count: int | None) -> None:
        """Ask again.

        Where the closure is what shows the wrapper, the first call draws its probes before it is
        seen; as one of so many ranks all the same, so that a resumed run draws what it would have.
        """
        self._agreed = False
        if count is not None and count == dist.get_world_size():
            self.rank, self.size = dist.get_rank(), count

    def number(self, call: int) -> int:
        """The ranks' calls one after the other."""
        return call * self.size + self.rank

    def check_finite(self, loss: float, trace: float, step: int, *, raising: bool) -> bool:
        """One number per penalised step."""
        known = self._all_there()
        if not self._agreed or not known:
            return super().check_finite(loss, trace, step, raising=raising)
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
        return found == 0

    # --- calls --------------------------------------------------------------------------------

    def call(self, *, lean: bool) -> Detour:
        """A detour past the wrappers, including those that only the closure shows."""
        return Detour(self.known, lean=lean, meet=self.meet)

    def aside(self) -> Detour:
        """A detour past the wrappers that leaves their reducers alone."""
        return Detour.local()

    def told(self, loss: Any) -> Any:
        """Inside a wrapper's forward pass, prepare its reducer for the backward pass now."""
        inside = active()
        return told(inside, loss) if inside is not None and self._holds(inside) else loss


def _signed(seed: int) -> int:
    """A seed as the int64 that has its bits; only these count (:func:`seht.probes.mix`)."""
    seed &= _MASK64
    return seed - (1 << 64) if seed >> 63 else seed
