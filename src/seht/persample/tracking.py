"""Follows the examples through a closure, from call to call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.errors import ExampleError
from seht.operators.axes import Axis, Broken, Call, Sum, Tag, bends, couples, first_of
from seht.operators.movement import moved
from seht.operators.operator import IN_PLACE
from seht.operators.table import AXES, LINEAR, MOVEMENT, PICKS
from seht.persample.errors import TRANSFORMED, no_sum
from seht.persample.experiment import ask
from seht.persample.memory import Layout, Memory, key_of
from seht.persample.tags import Tags
from seht.persample.weights import ProbedWeights
from seht.tensors.random_state import RandomState
from seht.tensors.trees import tensors

_SET = torch.Tensor.__setitem__
_GRAD = torch.autograd.grad
_GRADIENT = frozenset([torch.Tensor.grad.__get__])  # type: ignore[union-attr]
_READ = (
    "a gradient is read from .grad after a backward inside the closure (take it with "
    "torch.autograd.grad(..., create_graph=True))"
)
_PACKING = frozenset(
    [
        torch._C._VariableFunctions._pack_padded_sequence,
        torch._C._VariableFunctions._pad_packed_sequence,
    ]
)


class ExampleTracker(Tags):
    """The tags of one centre pass, given by the rules as the calls come."""

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        random: RandomState,
        memory: Memory,
        layout: Layout,
        since: int,
        *,
        coupling: str = "refuse",
    ) -> None:
        super().__init__(model, ProbedWeights(weights), layout, coupling, since)
        self.calls = 0
        self.holds = False
        """Whether batch statistics are held (``coupling="frozen"``)."""
        self._random = random
        self._memory = memory

    def hold(self) -> None:
        """Batch statistics are held."""
        self.holds = True

    def follow(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        *,
        weigh: bool = True,
        hidden: bool = False,
    ) -> None:
        """Tag what a call returned; ``hidden`` inside the forward of a custom Function."""
        self.calls += 1
        self.hidden = hidden
        try:
            self._follow(func, args, kwargs, out, weigh)
        finally:
            self.hidden = False

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, weigh: bool) -> None:
        if func is _SET or (func in IN_PLACE and out is None):
            out = args[0]
        outs: Any = [out] if isinstance(out, Tensor) else tuple(tensors(out))
        if not outs:
            return
        given = list(tensors((args, kwargs)))
        if self.layout.leaves:
            for t in given:
                self.adopt_leaf(t)
        if func in _GRADIENT and out.requires_grad:
            self.tag(out, Broken(_READ))
            return
        if weigh:
            self.weights.follow(func, args, kwargs, given, outs, hidden=self.hidden)
        tags = [self.get(t) for t in given]
        if not any(tag is not None for tag in tags):
            for o in outs:
                if id(o) not in self.own:
                    self.tag(o, None)
            return
        call = Call(func, args, kwargs, given, tags, out, self.n, self.hidden)
        found = self._tags_of(call, len(outs))
        if self.coupling == "own":
            found = [self._owned(call, o, tag) for o, tag in zip(outs, found, strict=True)]
        for o, tag in zip(outs, found, strict=True):
            if any(o is t for t in given):
                self.overwrite(o, tag, call.name)
            self.tag(o, tag)

    def _tags_of(self, call: Call, count: int) -> list[Tag | None]:
        """The tags of the results: from the function's row, or else by one experiment."""
        broken = next((t for t in call.tags if isinstance(t, Broken)), None)
        if broken is not None:
            return [broken] * count
        if self.n == 1:
            return [None] * count
        if call.func is _GRAD:
            self._memory.met_inner()
            return _gradients(call, self)
        total = first_of(Sum, call.tags)
        if total is not None and call.func in LINEAR:
            return [total] * count
        rule = AXES.get(call.func)
        if rule is not None and (isinstance(call.out, Tensor) or call.func in _PACKING):
            return [rule(call), *[None] * (count - 1)]
        if total is not None:
            return [bends(call, total)] * count
        if call.func is _SET:
            return [self._written(call)]
        if call.func in MOVEMENT and call.func in IN_PLACE:  # it has another shape already
            return [Broken(f"{call.name} changes a shape in place")] * count
        key = key_of(call)
        if key is not None and key in self._memory.answers:
            return self._memory.answers[key]
        moves = call.func in MOVEMENT or call.func in PICKS
        if moves and isinstance(call.main()[1], Axis):
            tags, holds = moved(call), True
        else:
            tags, holds = ask(call, self._random)
        if len(tags) != count:
            tags = [couples(call)] * count
        if key is not None and holds:
            self._memory.keep(key, tags)
        return tags

    def _written(self, call: Call) -> Tag | None:
        """target[index] = value: where the value's examples lie in the target."""
        target, index, value = call.args
        known = self.get(target)
        possible = [Axis(d) for d, size in enumerate(target.shape) if size == self.n]
        for axis in [known] if isinstance(known, Axis) else possible:
            slot = Call(torch.Tensor.__getitem__, (target, index), {}, [target], [axis],
                        target[index], self.n, self.hidden)  # fmt: skip
            place = AXES[torch.Tensor.__getitem__](slot)
            tag = self.get(value) if isinstance(value, Tensor) else None
            if tag is None:
                return known
            if isinstance(tag, Axis) and place == tag.at(tag.dim + slot.out.dim() - value.dim()):
                return axis
        return couples(call)

    def _owned(self, call: Call, out: Tensor, tag: Tag | None) -> Tag | None:
        """With ``coupling="own"``: keep the axis of the examples, if the output still has it."""
        if isinstance(tag, Sum):
            kept = [a for t, a in zip(call.given, call.tags, strict=True) if t.shape == out.shape]
            return first_of(Axis, kept) or tag
        if not isinstance(tag, Broken):
            return tag
        for t, axis in zip(call.given, call.tags, strict=True):
            place = axis.dim if isinstance(axis, Axis) else out.dim()
            if place < out.dim() and out.shape[place] == t.shape[place]:
                return axis
        return None

    def finish(self, loss: Tensor) -> None:
        """The loss must be a sum over the examples."""
        if not self.n:
            raise ExampleError(
                "estimator='seht-s' found no examples: the closure calls neither the model nor a "
                "part of it with a tensor that has a batch dimension; call model(inputs) in the "
                "closure, or use estimator='seht-h'"
            )
        if self.n == 1:  # its own probe is the shared one
            self.weights.share_all("the batch is one example")
            return
        tag = self.get(loss)
        if isinstance(tag, Broken) and self.coupling != "own":
            raise no_sum(tag.reason, self.layout.dim)
        met = self.weights.varied | self.weights.shared.keys()
        if met and not self.weights.moving():
            name, why = next(iter(self.weights.shared.items()))
            raise no_sum(
                f"no probed weight meets the examples on its own: {name} for one: {why}",
                self.layout.dim,
            )


# --- gradients that the closure takes itself ------------------------------------------------------


def _gradients(call: Call, tags: Tags) -> list[Tag | None]:
    """torch.autograd.grad: of a sum of terms with one example each, in each of its inputs.

    In an input that belongs to the examples the gradient does, too: only that example's term has
    it. In a weight, or anything that they share, it is a sum over them.
    """
    batched = bool(call.argument(6, "is_grads_batched", False))
    unseen = any(map(is_functorch_wrapped_tensor, call.given))
    broken = Broken(TRANSFORMED) if unseen else _coupled(call, batched)
    inputs = _listed(call.argument(1, "inputs"))
    pairs = [(x, g) for x, g in zip(inputs, call.out, strict=True) if g is not None]
    return [broken or _one(call, x, tags, batched) for x, _ in pairs]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _coupled(call: Call, batched: bool) -> Broken | None:
    """The reason if outputs times grad_outputs is no sum over the examples."""
    outputs, weights = _listed(call.argument(0, "outputs")), call.argument(2, "grad_outputs")
    total = first_of(Sum, [call.tag(t) for t in tensors(weights)])
    if total is not None:
        return bends(call, total)
    given = [None] * len(outputs) if weights is None else _listed(weights)
    for output, weight in zip(outputs, given, strict=True):
        mine, other = call.tag(output), call.tag(weight)
        if mine is None or other is None:
            continue
        if not isinstance(mine, Axis) or (mine.at(mine.dim + 1) if batched else mine) != other:
            return couples(call)
    return None


def _one(call: Call, x: Any, tags: Tags, batched: bool) -> Tag:
    tag = call.tag(x)
    if isinstance(tag, Sum):
        return bends(call, tag)
    shared = isinstance(x, Tensor) and (id(x) in tags.own or tags.weights.probed(x))
    if not shared and not tags.layout.leaves:
        # What was computed from it before the model was called has no tag yet: look again.
        return Broken(f"{call.name} takes a gradient in what may belong to no example")
    if isinstance(tag, Axis):
        return tag.at(tag.dim + 1) if batched else tag
    return tag or Sum(call.name)
