"""Every tensor's tag in one centre pass: where the examples lie in it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from seht.engines.persample.axes import SUM, Axis, Broken, Tag, every_tensor
from seht.engines.persample.errors import no_sum
from seht.engines.persample.memory import Layout
from seht.engines.persample.weights import ProbedWeights


class Tags:
    """The tags, by tensor."""

    def __init__(
        self, model: nn.Module, weights: ProbedWeights, layout: Layout, coupling: str
    ) -> None:
        self.n = 0
        """The number of examples, once they are found."""
        self.layout = layout
        self.coupling = coupling
        self.weights = weights
        self.own = {id(t) for t in (*model.parameters(), *model.buffers())}
        """The model's tensors, which belong to no example."""
        self.hidden = False
        """Inside the forward of a custom Function, where what is computed looks constant."""
        self._since = 0
        self._tags: dict[int, tuple[weakref.ref[Tensor], Tag | None]] = {}

    def tag(self, tensor: Tensor, tag: Tag | None) -> None:
        """Give a tensor its tag."""
        constant = not tensor.requires_grad and not self.hidden
        if constant and (tag is SUM or isinstance(tag, Broken)):
            tag = None  # a constant couples nothing
        self._tags[id(tensor)] = (weakref.ref(tensor), tag)

    def seen(self, tensor: Tensor) -> bool:
        """Whether it has its tag, be it none."""
        entry = self._tags.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def get(self, tensor: Tensor) -> Tag | None:
        """The tag of a tensor."""
        entry = self._tags.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        node = tensor.grad_fn
        if node is None or node._sequence_nr() < self._since or self.weights.probed(tensor):
            return None
        return Broken(
            f"{node.name()} is an operation that PyTorch does not show (wrap the apply of a "
            "custom autograd.Function with seht.register_kink)"
        )

    def knows(self, out: Any) -> bool:
        """Whether everything a call returned has its tag already, from the calls inside it."""
        outs = list(every_tensor(out))
        return bool(outs) and all(map(self.seen, outs))

    def same(self, old: Tensor, new: Tensor) -> None:
        """A copy made unseen has the tag of what it is a copy of."""
        self.tag(new, self.get(old))

    def axis(self, tensor: Tensor, func: Any, *, features: tuple[int, ...]) -> Axis | None:
        """The axis of what a layer is given, or None where it is the same for all examples.

        ``features`` are the dimensions that the layer works along.
        """
        tag = self.get(tensor)
        rank = tensor.dim()
        taken = {d % rank for d in features} if rank else set()
        name = getattr(func, "__name__", str(func))
        if isinstance(tag, Axis):
            if tag.dim in taken:
                raise no_sum(f"{name} works along the examples", self.layout.dim)
            return tag
        if tag is not None:
            reason = tag.reason if isinstance(tag, Broken) else f"{name} is given a sum over them"
            if self.coupling == "own":
                return None
            raise no_sum(reason, self.layout.dim)
        if self.layout.adopt and self.n > 1 and not tensor.requires_grad:
            for dim in (self.layout.dim, 1 - self.layout.dim):
                if 0 <= dim < rank and dim not in taken and tensor.shape[dim] == self.n:
                    return Axis(dim)
        return None
