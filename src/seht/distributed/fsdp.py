"""``fully_shard`` (FSDP2): one probe, one step and one loss for all ranks, each with its examples.

What FSDP keeps where is in ``shards.py``; what the passes do about it in ``fsdp_passes.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seht.distributed.detour import Detour
from seht.distributed.fsdp_passes import ShardedPasses
from seht.distributed.ranks import Ranks, broadcast
from seht.distributed.shards import Shards, parallel
from seht.estimators import SehtS
from seht.operators.rules import KeepGraph
from seht.precision.half_weights import HALVES
from seht.replay.centre import Plan, record
from seht.replay.passes import Passes
from seht.tensors.gradients import Gradient
from seht.tensors.memory import is_dtensor


class FSDPRanks(Ranks):
    """The ranks that hold the shards of a model."""

    in_group = True
    keeps_graphs = False
    """Weights are gathered anew in a backward pass, which serves one graph, and at once."""

    def __init__(self, shards: Shards, agreed: bool = False) -> None:
        self.shards = shards
        self._agreed = agreed
        """Whether all ranks use the first rank's seed already."""

    @classmethod
    def find(cls, model: nn.Module, before: Ranks | None) -> Ranks | None:
        """Where parts of the model are sharded; refuses FSDP1 and tensor parallelism."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return None  # nothing can be sharded
        kinds = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
        modules = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)]
        for name, module in modules:
            if isinstance(module, kinds[0]):
                raise RuntimeError(
                    f"{'module ' + repr(name) if name else 'the model'} is wrapped in "
                    "FullyShardedDataParallel (FSDP1), whose flattened weights cannot be probed; "
                    "shard it with torch.distributed.fsdp.fully_shard and call "
                    "penalty.backward(closure)"
                )
        shards = Shards([m for _, m in modules]) if modules else None
        known = set() if shards is None else {id(p.sharded_param) for p in shards.params}
        for name, weight in model.named_parameters():
            if is_dtensor(weight) and id(weight) not in known:
                raise parallel(name)
        agreed = isinstance(before, FSDPRanks) and before._agreed
        return None if shards is None else cls(shards, agreed)

    # --- refusals -----------------------------------------------------------------------------

    def need_whole(self, what: str) -> None:
        """Refuse: the weights are sharded."""
        raise RuntimeError(
            f"the model is sharded by fully_shard, and {what} needs whole weights; run it on an "
            "unsharded copy (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True gathers the weights)"
        )

    def settle(self, engine: str, estimator: object, *, lean: bool, elsewhere: bool) -> None:
        """Only the lean form of the difference engine; weights on their shards."""
        sharded = "the model is sharded by fully_shard, "
        if engine != "difference":
            raise RuntimeError(
                f"{sharded}through which engine={engine!r} cannot differentiate twice; leave "
                "engine= out and call penalty.backward(closure)"
            )
        if isinstance(estimator, SehtS):
            raise RuntimeError(
                f"{sharded}and estimator='seht-s' needs whole weights; use estimator='seht-h'"
            )
        if elsewhere:
            raise RuntimeError(
                f"{sharded}where on= has no form; leave it out (every= makes a penalty cheaper)"
            )
        if not lean:
            raise RuntimeError(
                f"{sharded}whose weights are gathered anew in a backward pass that comes later; "
                "call penalty.backward(closure) in place of penalty(closure) and loss.backward()"
            )
        self.shards.reshard()

    # --- numbers ------------------------------------------------------------------------------

    def agree(self, value: Any) -> Any:
        """The first rank's value, sent along each dimension of the mesh."""
        for dim in range(self.shards.mesh.ndim):
            value = broadcast(value, self.shards.mesh.get_group(dim))
        return value

    def mean(self, values: Tensor) -> Tensor:
        """Over all ranks of the mesh."""
        return (self.shards.sum(values) / self.shards.mesh.size()).to(values.dtype)

    def products(self, found: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Gradients are the mean of the ranks', and their parts lie on the shards."""
        shares = torch.tensor([self.shards.share(leaf) for leaf in leaves], dtype=found.dtype)
        return self.shards.sum((found * shares).sum(1))

    def place(self) -> int:
        """The rank itself."""
        return dist.get_rank()

    def seed(self, seed: int, calls: int) -> int:
        """One probe for all ranks."""
        if not self._agreed:
            seed, self._agreed = self.agree(seed), True
        return seed

    def reset(self, count: int | None) -> None:
        """Ask again."""
        self._agreed = False

    def noted(self, loss: Tensor) -> Tensor:
        """The loss that is trained is the mean over ranks."""
        return self.shards.mean(loss)

    # --- calls and passes ---------------------------------------------------------------------

    def call(self, *, lean: bool) -> Detour:
        """The closure may call a DDP beside the sharded model."""
        return Detour(lean=lean)

    @contextmanager
    def estimating(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Refuse half precision, as shards have no float32 copies. If the block fails, make FSDP
        forget the pass.
        """
        for name, w in weights.items():
            if w.dtype in HALVES:
                raise TypeError(
                    f"{name} is {w.dtype}, and shards have no float32 copies; keep the weights of "
                    "a sharded model in float32"
                )
        self.shards.refuse_partial()
        with self.shards.cleaned():
            yield

    def gradient(self, loss: Tensor, leaves: Sequence[Tensor]) -> Gradient:
        """By an ordinary backward pass, whose reduction leaves the mean on the shards."""
        with self.shards.cleaned(), self.shards.collecting(leaves):
            loss.backward()
            return [leaf.grad for leaf in leaves]

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Hide FSDP's gathering of weights from our modes."""
        with self.shards.cleaned(), self.shards.hidden():
            yield

    def passes(self, plan: Plan) -> Passes:
        """Passes over the shards, whose graphs cannot be kept."""
        try:
            centre = record(plan, self.shards.hidden)
        except KeepGraph:
            raise RuntimeError(
                "the model is sharded by fully_shard, whose graph serves one backward pass at "
                "once; remove backward hooks inside the network, and gradients that the closure "
                "takes itself, on penalised steps"
            ) from None
        return ShardedPasses(plan, centre, self.shards)
