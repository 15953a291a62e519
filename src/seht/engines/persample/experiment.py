"""Ask a function by experiment whether it keeps examples apart, and where it puts them.

The inputs of half of the examples are replaced by others, for several halves. If only entries of
those examples change in the output, along some dimension, that is its example axis. If no
dimension is left, the output may still be a sum over the examples: then two replacements together
change it by the sum of what each does alone. Anything else couples the examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seht.engines.kinks import IN_PLACE
from seht.engines.persample.axes import SUM, Axis, Tag, every_tensor, exchange
from seht.engines.persample.calls import Call, couples
from seht.probes import generator


def ask(call: Call, random: Any) -> list[Tag | None]:
    """One tag for each tensor that the call returned."""
    given, masks = call.given, _masks(call.n)
    with torch.no_grad():
        changed: list[list[Tensor]] = []
        try:
            base = _run(call, given, random)
            for mask in masks:
                other = _run(call, _mixed(call, given, mask), random)
                changed.append([_differs(a, b) for a, b in zip(base, other, strict=True)])
                del other
        except (RuntimeError, ValueError, TypeError, IndexError):
            return [couples(call)] * len(list(every_tensor(call.out)))
        tags: list[Tag | None] = []
        for place, out in enumerate(base):
            moved = [parts[place] for parts in changed]
            found: Tag | None = _locate(call, out, moved, masks)
            if found is None and any(bool(m.any()) for m in moved):
                found = _sum(call, given, place, masks[0], random)
            tags.append(found)
        return tags


def _masks(n: int) -> list[Tensor]:
    """Halves of the examples, and the other halves.

    Of a few examples any two can be told apart; of many, two random halves are enough to notice
    that some have met or changed places.
    """
    numbers = torch.randperm(n, generator=generator(1), device="cpu")
    bits = (n - 1).bit_length()
    halves = [(numbers >> bit & 1).bool() for bit in range(bits if n <= 16 else 2)]
    return [side for half in halves for side in (half, ~half)]


def _run(call: Call, given: list[Tensor], random: Any) -> list[Tensor]:
    fresh = iter([t.clone() for t in given])
    args, kwargs = exchange((call.args, call.kwargs), fresh)
    with random.kept():  # attention's dropout: one mask for all runs that are compared
        out = call.func(*args, **kwargs)
    return list(every_tensor(args[0] if call.func in IN_PLACE else out))


def _mixed(call: Call, given: list[Tensor], mask: Tensor) -> list[Tensor]:
    """The arguments with the examples of ``mask`` replaced by (parts of) their neighbours."""
    mixed = []
    for t, tag in zip(given, call.tags, strict=True):
        if not isinstance(tag, Axis):
            mixed.append(t)
            continue
        other = t.roll(tag.inner, tag.dim)
        if t.is_floating_point():
            other = other * 0.75
            if not bool(other.any()):
                other = torch.rand(t.shape, generator=generator(3), device="cpu").to(t) * 0.1
        where = mask[tag.owners(t.shape[tag.dim], call.n)].to(t.device)
        mixed.append(torch.where(_along(where, tag.dim, t.dim()), other, t))
    return mixed


def _along(vector: Tensor, dim: int, rank: int) -> Tensor:
    return vector.view([-1 if d == dim else 1 for d in range(rank)])


def _differs(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        return torch.ones_like(a, dtype=torch.bool)
    if not a.is_floating_point():
        return a != b
    size = a.abs().nan_to_num(0, 0, 0).amax() if a.numel() else 0.0
    close = 1e-9 if a.dtype == torch.float64 else 1e-5
    return ~torch.isclose(a, b, rtol=close, atol=close * float(size), equal_nan=True)


def _locate(call: Call, out: Tensor, moved: list[Tensor], masks: list[Tensor]) -> Axis | None:
    quiet: Axis | None = None
    for axis in _candidates(call, out):
        owners = axis.owners(out.shape[axis.dim], call.n)
        hits = [m.movedim(axis.dim, 0).reshape(len(owners), -1).any(1).cpu() for m in moved]
        if any(bool((hit & ~mask[owners]).any()) for hit, mask in zip(hits, masks, strict=True)):
            continue
        if any(bool(hit.any()) for hit in hits):
            return axis
        quiet = quiet or axis  # nothing changed: zeros_like, or an output that is zero
    return quiet


def _candidates(call: Call, out: Tensor) -> Iterator[Axis]:
    axes = [tag for tag in call.tags if isinstance(tag, Axis)]
    own = [a for a in axes if a.dim < out.dim()]
    dims = list(dict.fromkeys([*(a.dim for a in own), *range(out.dim())]))
    sizes = {
        t.shape[a.dim]: a
        for t, a in zip(call.given, call.tags, strict=True)
        if isinstance(a, Axis) and a.owner is not None
    }
    for dim in dims:
        size = out.shape[dim]
        if size in sizes:
            yield sizes[size].at(dim)
        if size == 0 or size % call.n:
            continue
        times = size // call.n
        inners = [k for k in range(1, times + 1) if times % k == 0]
        for inner in sorted(inners, key=lambda k: not any(a.inner == k for a in axes)):
            yield Axis(dim, inner)


def _sum(call: Call, given: list[Tensor], place: int, half: Tensor, random: Any) -> Tag | None:
    wide = [t.double() if t.is_floating_point() else t for t in given]
    try:
        none, a, b, both = (
            _run(call, _mixed(call, wide, mask), random)[place].double()
            for mask in (half & False, half, ~half, half | True)
        )
        rest = (none + both - a - b).abs().max()  # nonzero has another shape each time
    except (RuntimeError, TypeError):
        return couples(call)
    size = torch.stack([(x - none).abs().max() for x in (a, b, both)]).max()
    return SUM if bool(rest <= 1e-6 * size) else couples(call)
