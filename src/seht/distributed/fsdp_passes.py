"""The passes of a difference estimate over the shards of an FSDP2 model.

One probe and one step for all ranks, each pass on every rank's own part of the batch: the loss is
the mean over ranks, and so are the gradients that FSDP's reduction leaves on the shards. Inner
products and norms are taken on the shards and summed over ranks; the decisions of a pass are those
of the rank's own examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seht.distributed.shards import Shards
from seht.precision.policy import Precision
from seht.replay.centre import Centre, Plan
from seht.replay.leaves import Leaves
from seht.replay.passes import Passes
from seht.replay.state import BorrowedBuffers, Weights, step_size
from seht.task import Directions
from seht.tensors.gradients import Gradient, Take, dense, handed_out, real, stride_of
from seht.tensors.graph import refuse_older
from seht.tensors.memory import is_dtensor, local, place


class ShardedWeights(Weights):
    """The drawn weights' parts on this rank."""

    def __init__(self, weights: dict[str, Tensor], shards: Shards) -> None:
        super().__init__({name: local(w) for name, w in weights.items()})
        self._shards = shards
        self._shares = {name: shards.share(w) for name, w in weights.items()}

    def step(self, sigma: Directions, kappa: float) -> Tensor:
        """One e for all ranks: both norms are those of the whole tensors."""
        sizes, parts = self.lengths(sigma)
        return step_size(sizes.norm(), parts.norm(), kappa)

    def lengths(self, sigma: Directions) -> tuple[Tensor, Tensor]:
        """Those of the whole tensors."""
        squares = [
            torch.stack([_square(w), _square(sigma[name])]) * self._shares[name]
            for name, w in self._weights.items()
        ]
        sizes, parts = self._shards.sum(torch.stack(squares)).sqrt().unbind(1)
        return sizes, parts

    @contextmanager
    def moved(self, sigma: Directions, step: Tensor | float) -> Iterator[None]:
        """The shards are w + step * sigma while the block runs, its backward pass included."""
        try:
            with super().moved(sigma, step), self._shards.cleaned():
                self._shards.reshard()
                yield
        finally:
            self._shards.reshard()


class ShardedLeaves(Leaves):
    """Leaves whose gradients are reduced by FSDP2: each rank has its part of them."""

    def __init__(
        self,
        tensors: list[Tensor],
        made: list[Tensor],
        precision: Precision,
        *,
        older: bool,
        shards: Shards,
    ) -> None:
        super().__init__(tensors, made, precision, older=older)
        self._shards = shards

    def pull(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None] | None,
        *,
        keep: bool,
        take: Take | None = None,
        more: Sequence[Tensor] = (),
    ) -> Gradient:
        """The gradient in every leaf, reduced over ranks where FSDP does so: parts on this rank.

        By an ordinary backward pass: ``autograd.grad`` would hand out whole gradients of the
        gathered weights, each rank's own.
        """
        with self._shards.collecting([*self.tensors, *(leaf for _, leaf in self._twins)]):
            torch.autograd.backward(outputs, cotangents, retain_graph=keep)
            found = [leaf.grad for leaf in self.tensors]
            for place, twin in self._twins:
                found[place] = twin.grad if found[place] is None else found[place]
        return [None if g is None else dense(local(g)) for g in found]

    def sketch(self, gradient: Gradient) -> Tensor:
        """This rank's part of what one process would look at."""
        parts = []
        for leaf, g in zip(self.tensors, gradient, strict=False):
            stride = stride_of(leaf)
            first = -_offset(leaf) % stride
            seen = local(leaf) * 0 if g is None else g
            taken = seen.flatten()[first::stride]
            parts.append(real(taken).double() * (stride * self._shards.share(leaf)) ** 0.5)
        return torch.cat(parts)

    def sizes(self, *sketches: Tensor) -> list[Tensor]:
        """Norms over all ranks."""
        return list(self._shards.sum(torch.stack([s.square().sum() for s in sketches])).sqrt())

    def handed_out(self, value: Tensor, total: Gradient) -> Tensor:
        """The same with ``DTensor`` gradients for the shards."""
        with torch.no_grad():
            parts = [
                None if g is None else _like(g, leaf)
                for g, leaf in zip(total, self.tensors, strict=False)
            ]
        return handed_out(value, parts, self.tensors[: len(parts)])


class ShardedPasses(Passes):
    """Passes whose weights are gathered and whose gradients are reduced by FSDP2."""

    @property
    def lasting(self) -> bool:
        """Weights are gathered anew for a backward pass, which serves one graph."""
        return False

    def __init__(self, plan: Plan, centre: Centre, shards: Shards) -> None:
        self.shards = shards
        self._refuse_others(centre.buffers)
        super().__init__(plan, centre, shards.hidden)

    def _reached(self, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves are the shards."""
        shards = {id(p.sharded_param): p.sharded_param for p in self.shards.params}
        own = {*self.shards.gathered, *shards}
        others = [leaf for leaf in leaves if id(leaf) not in own]
        reached = [*(w for w in shards.values() if w.requires_grad), *others]
        return reached, self._beside_the_model(others)  # a part may not be sharded

    def _drawn(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """What is used on one rank counts as used on all."""
        gathered, weights = self.shards.gathered, self.task.weights
        met = {id(gathered.get(id(leaf), leaf)): leaf for leaf in leaves}
        if self.older:
            drawn = {n: met.get(id(w), w) for n, w in weights.items()}
            refuse_older(drawn, [self.loss], self._centre.since)
        mask = torch.tensor([float(id(w) in met) for w in weights.values()])
        uses = self.shards.sum(mask).tolist()
        return {n: w for (n, w), use in zip(weights.items(), uses, strict=True) if use}

    def _refuse_others(self, buffers: BorrowedBuffers) -> None:
        known = {id(state) for state in self.shards.states}
        for module in buffers.modules_beside:
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            if state is not None and id(state) not in known:
                raise RuntimeError(
                    f"the closure calls a {type(module).__name__} that fully_shard sharded "
                    "and that is no part of the penalty's model; give HessianTrace a module "
                    "that holds both, and choose the weights with params="
                )

    def _leaves(self, tensors: list[Tensor], made: list[Tensor]) -> Leaves:
        shards = self.shards
        return ShardedLeaves(tensors, made, self.precision, older=self.older, shards=shards)

    def _movable(self, still: set[str]) -> Weights:
        return ShardedWeights(self.used, self.shards)

    def commit(self) -> None:
        """Take over buffers, and gradients of plain calls that wait for this one."""
        super().commit()
        self.shards.reduce_waiting()

    def pull_along(self, sigma: Directions, *args: Any, **options: Any) -> dict[str, Tensor]:
        """This rank's share of sigma . g for each drawn tensor."""
        found = super().pull_along(sigma, *args, **options)
        return {name: g * self.shards.share(self.used[name]) for name, g in found.items()}

    @property
    def own(self) -> Tensor:
        """This rank's own loss."""
        return self.loss.detach()

    def over_ranks(self, value: Tensor, loss: Tensor, *, partial: bool) -> tuple[Tensor, Tensor]:
        """The trace and the loss of all ranks; ``partial`` values are summed, others averaged."""
        trace = self.shards.sum(value) if partial else self.shards.mean(value).to(value.dtype)
        return trace, self.shards.mean(loss).to(loss.dtype)

    def tie(self, behind: set[int]) -> None:
        """The loss's own curvature is taken outside the pass, when such weights are sharded."""
        super().tie(behind)
        if behind & {*self.shards.gathered, *(id(p.sharded_param) for p in self.shards.params)}:
            raise RuntimeError(
                'curvature="ggn": sharded weights lie behind the outputs, where the loss is '
                "differentiated twice; choose a boundary= behind them, or use curvature='hessian'"
            )


def _square(t: Tensor) -> Tensor:
    wide = t if t.is_floating_point() else t.float()
    return torch.linalg.vector_norm(wide).double().square()


def _like(part: Tensor, tensor: Any) -> Tensor:
    """This rank's part of a gradient as what ``tensor.grad`` has to be."""
    if not is_dtensor(tensor):
        return part
    found: Tensor = type(tensor.detach()).from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return found


def _offset(leaf: Tensor) -> int:
    """How many numbers of the whole tensor come before this rank's part (rows of it)."""
    if not is_dtensor(leaf) or not leaf.numel():
        return 0
    start, _ = place(leaf)[0]
    return start * (leaf.numel() // leaf.shape[0])
