"""How a gradient that the closure takes itself carries the examples."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.operators.axes import Axis, Broken, Call, Sum, Tag, bends, couples, first_of
from seht.persample.errors import TRANSFORMED
from seht.persample.tags import Tags
from seht.tensors.trees import tensors


def gradients(call: Call, tags: Tags) -> list[Tag | None]:
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
