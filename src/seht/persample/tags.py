"""The tags of one centre pass, which say where the examples lie in each tensor, and where the
examples begin: in the model's inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.utils.rnn import PackedSequence

from seht.operators.axes import Axis, Broken, Sum, Tag, axis_from
from seht.operators.rules import called
from seht.persample.errors import TRANSFORMED, no_sum
from seht.persample.memory import Layout
from seht.persample.weights import ProbedWeights
from seht.tensors.memory import root_of
from seht.tensors.trees import tensors


class Tags:
    """The tags, by tensor."""

    def __init__(
        self,
        model: nn.Module,
        weights: ProbedWeights,
        layout: Layout,
        coupling: str,
        since: int,
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
        self._model = model
        self._depth = 0
        """How many calls of the model, or of its parts, are under way."""
        self._since = since
        """Graph nodes made from now on are the closure's."""
        self._tags: dict[int, tuple[weakref.ref[Tensor], Tag | None, int]] = {}
        """By identity: the tensor, its tag, and how often its memory had been written to."""
        self._changed: dict[int, tuple[weakref.ref[Tensor], Tag, int]] = {}
        """By identity of a base tensor: what was written into its memory through a view."""

    def found(self, count: int) -> bool:
        """Whether ``count`` is the number of examples; the first call sets that number."""
        self.n = self.n or count
        return self.n == count

    def tag(self, tensor: Tensor, tag: Tag | None) -> None:
        """Give a tensor its tag."""
        constant = not tensor.requires_grad and not self.hidden
        if constant and isinstance(tag, (Sum, Broken)):
            tag = None  # a constant couples nothing
        times = self._change(tensor)[1] if self._changed else 0
        self._tags[id(tensor)] = (weakref.ref(tensor), tag, times)

    def overwrite(self, tensor: Tensor, tag: Tag | None, name: str) -> None:
        """A call wrote into a tensor: other views of the same memory may have another tag now."""
        before = self.get(tensor)
        constant = not tensor.requires_grad and not self.hidden
        if tag is None or tag == before or constant:
            return
        root = root_of(tensor)
        if root is tensor and not self._viewed(tensor):
            return
        known, times = self._change(tensor)
        kept = isinstance(tag, Sum) and not isinstance(known, Broken)
        lost = Broken(f"{name} writes examples through a view, among others")
        written = tag if kept or isinstance(tag, Broken) else lost
        self._changed[id(root)] = (weakref.ref(root), written, times + 1)

    def _viewed(self, root: Tensor) -> bool:
        """Whether a tensor that has a tag is a view of it."""
        tagged = (entry[0]() for entry in self._tags.values())
        return any(t is not None and t is not root and root_of(t) is root for t in tagged)

    def _change(self, tensor: Tensor) -> tuple[Tag | None, int]:
        """What was written last into the memory of a tensor, and how often it was written to."""
        root = root_of(tensor)
        entry = self._changed.get(id(root))
        return (None, 0) if entry is None or entry[0]() is not root else entry[1:]

    def seen(self, tensor: Tensor) -> bool:
        """Whether the tag of a tensor is known, even if it has none."""
        entry = self._tags.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def get(self, tensor: Tensor) -> Tag | None:
        """The tag of a tensor."""
        entry = self._tags.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            if self._changed and self._change(tensor)[1] > entry[2]:
                return entry[1] if isinstance(entry[1], Broken) else self._change(tensor)[0]
            return entry[1]
        node = tensor.grad_fn
        if node is None or node._sequence_nr() < self._since or self.weights.probed(tensor):
            return None
        if isinstance(node, BackwardCFunction):
            return Broken(
                f"{node.name()} is an operation that PyTorch does not show (wrap the apply of a "
                "custom autograd.Function with seht.register_kink)"
            )
        return Broken(
            f"{node.name()} was computed where PyTorch shows no operations, as in torch.func and "
            "torch.vmap (take gradients inside the closure with torch.autograd.grad(..., "
            "create_graph=True))"
        )

    def knows(self, out: Any, args: Any) -> bool:
        """Whether everything a call returned has its tag already, from the calls inside it; what
        it was given it may have written into.
        """
        outs = list(tensors(out))
        return (
            bool(outs) and all(map(self.seen, outs)) and not any(o is a for o in outs for a in args)
        )

    def adopt_leaf(self, tensor: Tensor) -> None:
        """A leaf of the closure's own belongs to the examples, if it has their number."""
        dim = self.layout.dim
        own = id(tensor) in self.own or self.weights.probed(tensor)
        if own or not tensor.requires_grad or tensor.grad_fn is not None:
            return
        fits = tensor.dim() > dim and tensor.shape[dim] > 1 and self.get(tensor) is None
        if fits and self.found(tensor.shape[dim]):
            self.tag(tensor, Axis(dim))

    def same(self, old: Tensor, new: Tensor) -> None:
        """Give a copy that no mode saw the tag of its original."""
        self.tag(new, self.get(old))

    def axis(self, tensor: Tensor, func: Any, *, features: tuple[int, ...]) -> Axis | None:
        """The axis of what a layer is given, or None where it is the same for all examples.

        ``features`` are the dimensions that the layer works along.
        """
        tag = self.get(tensor)
        rank = tensor.dim()
        taken = {d % rank for d in features} if rank else set()
        if isinstance(tag, Axis):
            if tag.dim in taken:
                raise no_sum(f"{called(func)} works along the examples", self.layout.dim)
            return tag
        if tag is not None:
            reason = (
                tag.reason
                if isinstance(tag, Broken)
                else f"{tag.by} adds them up before they meet a weight, in {called(func)}"
            )
            if self.coupling == "own":
                return None
            raise no_sum(reason, self.layout.dim)
        if self.layout.adopt and self.n > 1 and not tensor.requires_grad:
            for dim in (self.layout.dim, 1 - self.layout.dim):
                if 0 <= dim < rank and dim not in taken and tensor.shape[dim] == self.n:
                    return Axis(dim)
        return None

    # --- where they begin: in the arguments of the model's outermost calls ------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tag what the outermost calls of the model are given."""
        modules = list(self._model.modules()) if self.layout.deep else [self._model]
        with ExitStack() as after:
            for module in modules:
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                behind = module.register_forward_hook(self._leave, always_call=True)
                after.callback(before.remove)
                after.callback(behind.remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            with torch._C.DisableTorchFunction():
                self._begin((args, kwargs))

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._depth -= 1

    def _begin(self, value: Any) -> None:
        if isinstance(value, PackedSequence):
            self._begin_packed(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._begin(item)
        elif hasattr(value, "keys"):
            for key in value:
                self._begin(value[key])
        elif isinstance(value, Tensor) and id(value) not in self.own:
            if is_functorch_wrapped_tensor(value) and torch.is_grad_enabled():
                raise no_sum(TRANSFORMED, self.layout.dim)
            if not self._new(value):
                return
            for dim in (self.layout.dim, 1 - self.layout.dim):
                if value.dim() > dim >= 0 and self.found(value.shape[dim]):
                    self.tag(value, Axis(dim))
                    return

    def _new(self, value: Tensor) -> bool:
        """Whether this is where examples begin; what the closure made on the way counts as an
        input of the model (a slice of the batch), but not as one of a part of it (positions).
        """
        return not self.seen(value) if self.layout.deep else self.get(value) is None

    def _begin_packed(self, value: PackedSequence) -> None:
        count = int(value.batch_sizes[0])
        if self.found(count) and self._new(value.data):
            order = value.sorted_indices
            order = torch.arange(count, device="cpu") if order is None else order
            owners = [order[:k].cpu() for k in value.batch_sizes.tolist()]
            self.tag(value.data, axis_from(0, torch.cat(owners), count))
