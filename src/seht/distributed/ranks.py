"""The interface of ranks: what the penalty and the engines need to know of other processes.

They use a :class:`Ranks` and never ask which kind it is. The class itself stands for one
process alone; a kind of wrapper (``ddp.py``, ``fsdp.py``) overrides what is different there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seht.replay.centre import Plan, record
from seht.replay.passes import Passes
from seht.task import Closure
from seht.tensors.gradients import Gradient
from seht.tensors.graph import quiet


def grouped() -> bool:
    """Whether this process belongs to a process group; without one there is no DDP."""
    return dist.is_available() and dist.is_initialized()


def broadcast(value: Any, group: Any, device: torch.device | None = None) -> Any:
    """The value of the group's first rank."""
    found = [value]
    first = dist.get_global_rank(group, 0)
    dist.broadcast_object_list(found, src=first, group=group, device=device)
    return found[0]


class PenaltyCall:
    """One call of the penalty: what to do before, around and after it."""

    def __enter__(self) -> PenaltyCall:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of the call stays."""

    def checked(self, closure: Closure) -> Closure:
        """The closure, with a check of its communication between ranks."""
        return closure

    def penalise(self) -> None:
        """From here on the closure runs several times."""

    def finish(self, result: Any) -> Any:
        """What the call returns, ready for the one backward pass to come."""
        return result


class Ranks:
    """The processes that train one model together, seen from one of them."""

    keeps_graphs = True
    """Whether a graph can be differentiated later, and more than once."""
    wrapper: type[nn.Module] | None = None
    """The class that holds a model as its ``module``, without weights or outputs of its own."""
    in_group = False
    """Whether there are such ranks in a process group of ``torch.distributed`` only."""

    @classmethod
    def find(cls, model: nn.Module, before: Ranks | None) -> Ranks | None:
        """These ranks, if the model is wrapped for them now; refuses what cannot be probed.

        ``before`` is what the last call found: it goes on where nothing has changed.
        """
        return None

    def __reduce__(self) -> Any:
        """Copies and pickles of a penalty look for their ranks again."""
        return Ranks, ()

    # --- refusals -----------------------------------------------------------------------------

    def need_whole(self, what: str) -> None:
        """Refuse ``what`` where weights are not whole on each rank."""

    def settle(self, engine: str, estimator: object, *, lean: bool, elsewhere: bool) -> None:
        """Before every call, plain or penalised: refuse what is not possible here, at the first
        call and not at the end of the warm-up.
        """

    # --- numbers ------------------------------------------------------------------------------

    def agree(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        return value

    def mean(self, values: Tensor) -> Tensor:
        """The average over all ranks of a few numbers. Every rank must ask, outside of a pass."""
        return values

    def averaged(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The mean over ranks of each rank's own gradients, which is what the optimiser sees."""
        return parts

    def products(self, found: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Inner products of gradients, from those of their parts: a row for each, with a column for
        each leaf. The same on all ranks.
        """
        return self.mean(found.sum(1))

    def place(self) -> int | None:
        """The number of the rank if it holds only a part of each weight; otherwise None."""
        return None

    def seed(self, seed: int, calls: int) -> int:
        """The first rank's seed, asked for once, before layers are drawn."""
        return seed

    def state(self) -> int | None:
        """How many ranks have agreed on a seed, for a resumed run."""
        return None

    def reset(self, count: int | None) -> None:
        """The seed has been replaced by one on which so many ranks had agreed: ask again."""

    def number(self, call: int) -> int:
        """The number of this rank's call among all calls of the step, so that probes differ."""
        return call

    def noted(self, loss: Tensor) -> Tensor:
        """The loss to record for a plain step."""
        return loss

    def check_finite(self, loss: float, trace: float, step: int, *, raising: bool) -> bool:
        """Raise here what another rank is about to raise; otherwise this one would wait for it.
        Whether the trace is finite on all of them.
        """
        return math.isfinite(trace)

    # --- calls --------------------------------------------------------------------------------

    def call(self, *, lean: bool) -> PenaltyCall:
        """Around one call of the penalty."""
        return PenaltyCall()

    def aside(self) -> PenaltyCall:
        """Around an estimate that stays on this rank and communicates with no other."""
        return PenaltyCall()

    def told(self, loss: Any) -> Any:
        """The loss, ready for a backward pass inside a wrapped training step."""
        return loss

    # --- for the engines, and for looks at gradients ------------------------------------------

    def gradient(self, loss: Tensor, leaves: Sequence[Tensor]) -> Gradient:
        """The gradient of a loss, without running users' hooks."""
        with quiet(leaves):
            return list(torch.autograd.grad(loss, leaves, allow_unused=True))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around a pass of the closure under a mode of ours, outside an estimate."""
        yield

    def estimating(self, weights: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Around one estimate: refuses weights that cannot be moved, and cleans up if it fails."""
        return nullcontext()

    def passes(self, plan: Plan) -> Passes:
        """The passes of a difference estimate, of which the first has run."""
        return Passes(plan, record(plan))


LOCAL = Ranks()
"""One process alone."""

KINDS: list[type[Ranks]] = []
"""The kinds of wrapper, listed in ``__init__.py``; the first whose ``find`` recognises a model."""


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
