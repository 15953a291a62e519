"""Find out by experiment whether a function keeps examples apart, and where it puts them.

The inputs of some examples are replaced by others, for several sets of them, such that of any two
examples each is once replaced without the other. If only entries of the replaced examples change
in the output, along some dimension, that is its example axis. If no dimension is left, the output
may still be a sum over the examples: then two replacements together change it by the sum of what
each does alone. Anything else couples the examples.

What the examples share (weights, masks, constants) is replaced by random numbers, so that the
answer is a property of the function and holds in later steps: a mixing matrix may happen to be
zero, or the identity, in this one. Only if a function mixes examples in general are constants taken
as they are, and then the answer is for this step alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor

from seht.operators.axes import Axis, Call, Sum, Tag, along, couples, divisors
from seht.operators.operator import IN_PLACE
from seht.probes import generator
from seht.tensors.trees import mapped, tensors


def ask(call: Call, random: Any) -> tuple[list[Tag | None], bool]:
    """A tag for each tensor that the call returned, and whether it is valid in later steps."""
    general = _answer(call, random, _made_up(call, constants=True))
    if general is not None:
        apart = all(tag is None or isinstance(tag, Axis) for tag in general)
        given = zip(call.given, call.tags, strict=True)
        # Are there constants whose values may matter?
        if apart or not any(k is None and not call.varies(t) and t.numel() > 1 for t, k in given):
            return general, True
    found = _answer(call, random, _made_up(call, constants=False))
    return found or [couples(call)] * len(list(tensors(call.out))), False


def _made_up(call: Call, *, constants: bool) -> list[Tensor]:
    """The arguments with other numbers for what has no tag: weights, and ``constants`` if asked."""
    found = []
    for place, (t, tag) in enumerate(zip(call.given, call.tags, strict=True)):
        dense = t.layout == torch.strided and t.numel() > 1
        if tag is not None or not dense or not (constants or call.varies(t)):
            found.append(t)
        elif t.is_floating_point():
            # Between 1/4 and 3/4: a variance, a probability, a weight may have such a value.
            drawn = torch.rand(t.shape, generator=generator(5 + place), device="cpu") / 2 + 0.25
            found.append(drawn.to(t))
        elif t.dtype == torch.bool:
            drawn = torch.rand(t.shape, generator=generator(5 + place), device="cpu") < 0.5
            found.append(drawn.to(t.device))
        else:
            found.append(t)
    return found


def _answer(call: Call, random: Any, given: list[Tensor]) -> list[Tag | None] | None:
    """One tag for each output; None where the function does not take these arguments."""
    masks = _masks(call.n)
    with torch.no_grad():
        changed: list[list[Tensor]] = []
        try:
            base = _run(call, given, random)
            for mask in masks:
                other = _run(call, _mixed(call, given, mask), random)
                changed.append([_differs(a, b) for a, b in zip(base, other, strict=True)])
                del other
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
        tags: list[Tag | None] = []
        for place, out in enumerate(base):
            moved = [parts[place] for parts in changed]
            found: Tag | None = _locate(call, out, moved, masks)
            if found is None and any(bool(m.any()) for m in moved):
                found = _sum(call, given, place, masks, random)
            tags.append(found)
        return tags


def _masks(n: int) -> list[Tensor]:
    """Sets of examples: of any two examples each is in one without the other.

    As many sets as there are needed for every example to be in another half of them (Sperner's
    theorem: no half is then a part of another one).
    """
    count = next(m for m in range(1, 64) if math.comb(m, m // 2) >= n)
    codes = list(islice(combinations(range(count), count // 2), n))
    numbers = torch.randperm(n, generator=generator(1), device="cpu").tolist()
    sets = torch.zeros(count, n, dtype=torch.bool, device="cpu")
    for example, code in zip(numbers, codes, strict=True):
        sets[list(code), example] = True
    return list(sets)


def _run(call: Call, given: list[Tensor], random: Any) -> list[Tensor]:
    fresh = iter([t.clone() for t in given])
    args, kwargs = mapped((call.args, call.kwargs), lambda _: next(fresh))
    with random.kept():  # attention's dropout: one mask for all runs that are compared
        out = call.func(*args, **kwargs)
    return list(tensors(args[0] if call.func in IN_PLACE else out))


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
        mixed.append(torch.where(along(where, tag.dim, t.dim()), other, t))
    return mixed


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two outputs differ by more than rounding, which is small beside what has changed most,
    or beside the entry itself.
    """
    if a.shape != b.shape:
        return torch.ones_like(a, dtype=torch.bool)
    same = (a == b) | (a.isnan() & b.isnan())
    if not a.is_floating_point():
        return ~same
    close = 1e-9 if a.dtype == torch.float64 else 1e-5
    moved = torch.where(same, 0, (a - b).abs())
    most = float(moved.nan_to_num(0, 0, 0).amax()) if a.numel() else 0.0
    small = moved <= close * most + 8 * torch.finfo(a.dtype).eps * a.abs()
    return ~(same | small)


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
        for inner in sorted(
            divisors(size // call.n), key=lambda k: not any(a.inner == k for a in axes)
        ):
            yield Axis(dim, inner)


def _wide(t: Tensor) -> Tensor:
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t


def _sum(call: Call, given: list[Tensor], place: int, masks: list[Tensor], random: Any) -> Tag:
    """A sum over examples: no two of them do more together than each alone."""
    wide = [_wide(t) for t in given]

    def at(mask: Tensor) -> Tensor:
        return _wide(_run(call, _mixed(call, wide, mask), random)[place])

    try:
        none, both = at(masks[0] & False), at(masks[0] | True)
        if not (none.is_floating_point() or none.is_complex()):
            return couples(call)
        for mask in masks:
            a, b = at(mask), at(~mask)
            rest = (none + both - a - b).abs().max()  # nonzero has another shape each time
            size = torch.stack([(x - none).abs().max() for x in (a, b, both)]).max()
            if not bool(rest <= 1e-9 * size):
                return couples(call)
    except (RuntimeError, TypeError):
        return couples(call)
    return Sum(call.name)
