"""How loss functions carry the examples: each has its own loss, or they are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from seht.operators.axes.arithmetic import elementwise
from seht.operators.axes.axes import Axis, Call, Sum, Tag, bends, couples, first_of


def _reduced(call: Call, tag: Tag | None) -> Tag | None:
    """Added up or not: seen in what came out, as there are old names for ``reduction``, too."""
    whole = call.out.dim() == 0 and isinstance(tag, Axis)
    return Sum(call.name) if whole else tag


def entries(call: Call) -> Tag | None:
    """A loss of each entry: squared error, binary cross-entropy and the like."""
    pair = [call.main()[0], call.argument(1, "target")]
    if call.beside(*pair):  # weights that the examples have made: a mean divides by their sum
        return couples(call)
    shape = torch.broadcast_shapes(*(t.shape for t in pair))
    whole = call.out.new_empty(()).expand(shape)  # what it is before it is reduced
    return _reduced(call, elementwise(call._replace(out=whole)))


def classes(call: Call) -> Tag | None:
    """A loss of each row of logits: the classes lie along dimension 1, or are all there is."""
    x, axis = call.main()
    target = call.argument(1, "target")
    others = call.beside(x)
    total = first_of(Sum, [axis, *others])
    if total is not None:
        return bends(call, total)
    column = 1 if x.dim() > 1 else 0
    found = axis
    if others:  # soft targets that the examples have made
        mine = call.tag(target)
        if call.beside(x, target) or (axis is not None and mine != axis):
            return couples(call)
        if not (isinstance(target, Tensor) and target.shape == x.shape):
            return couples(call)
        found = mine
    if not isinstance(found, Axis):
        return found
    if found.dim == column:
        return couples(call)
    return _reduced(call, found.at(found.dim - (found.dim > column)))


def chosen(call: Call) -> Tag | None:
    """nll_loss: picks an entry of each row, and is linear in it."""
    x, tag = call.main()
    if isinstance(tag, Sum) and not call.beside(x):
        return tag
    return classes(call)
