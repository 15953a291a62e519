r"""The signs of per-sample probes, and the product that applies them.

The probe of example n in a weight is :math:`s_n = S \circ r_n q_n^T`: one shared Rademacher
:math:`S` with a sign vector over the weight's first dimension and one over its second, drawn for
each example (the flipout device, arXiv 1803.04386). Each :math:`s_n` is Rademacher, and a layer at
:math:`W + e s_n` costs one product more:

.. math:: (W + e\,s_n) x = W x + e\, r_n \circ (S (q_n \circ x)) .

That product may be a small one. S need not be drawn entry by entry, as r and q make entries of
different rows and columns independent in any case: it is one block of at most eight rows and eight
columns, repeated over the weight. Then S x is the block times the sum of the pieces of x, and the
examples' own directions cost next to nothing beside one direction for all.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seht import probes as draw
from seht.operators.axes import Axis, along, line, varying_dims
from seht.persample.weights import Part
from seht.task import Probe

_ROWS, _COLUMNS = 11, 12
_BLOCK = 8
"""Rows and columns of the block that S repeats. One of a single entry would vary more: every four
entries at the corners of a rectangle would have the product 1."""


def _block(size: int) -> int:
    """The largest divisor up to eight, or the whole size if that divisor is too small."""
    found = max(d for d in range(1, _BLOCK + 1) if size % d == 0)
    return found if 2 * found > min(size, _BLOCK) else size


class Slot(NamedTuple):
    """A probed weight, or a view of it, in a call: along which of its dimensions r and q lie, and
    in which order.
    """

    part: Part
    rows: tuple[int, Tensor | None]
    columns: tuple[int, Tensor | None] | None


def slot_of(part: Part, weight: Tensor) -> Slot | None:
    """None if the signs of the weight are no product in this view."""
    if not part.path:
        return Slot(part, (0, None), (1, None) if weight.dim() > 1 else None)
    rows = _line(part, weight, 0)
    columns = _line(part, weight, 1) if weight.dim() > 1 else None
    if rows is None or (weight.dim() > 1 and columns is None):
        return None
    return Slot(part, rows, columns)


def _line(part: Part, weight: Tensor, dim: int) -> tuple[int, Tensor] | None:
    places = along(torch.arange(weight.shape[dim], device=weight.device), dim, weight.dim())
    view = part.of(places.expand(weight.shape))
    varying = varying_dims(view) or [0]
    if len(varying) > 1 or view.dim() == 0:
        return None
    return varying[0], line(view, varying[0])


class Signs:
    """One probe at one distance: the shared part, the signs of each example, the step."""

    def __init__(
        self,
        probe: Probe,
        weights: dict[str, Tensor],
        n: int,
        names: Set[str],
        *,
        frugal: bool = False,
    ) -> None:
        self.names = names
        """The weights with a direction for each example."""
        self.n = n
        self.frugal = frugal
        """Work through the batch in pieces: less memory, where no graph is kept anyway."""
        self._probe = probe
        self._weights = weights
        self._kept: dict[Any, Tensor] = {}
        self.steps: dict[str, Tensor] = {}

    def move(self, step: Tensor | float, *, track: bool) -> list[Tensor]:
        """Go to this distance; the steps are leaves, one for each weight, if ``track``."""
        self._kept = {k: v for k, v in self._kept.items() if k[0] != "out"}
        for name in self.names:
            w = self._weights[name]
            value = torch.as_tensor(step, dtype=w.dtype, device=w.device).detach().clone()
            self.steps[name] = value.requires_grad_(track)
        return list(self.steps.values())

    def _cached(self, key: Any, make: Any) -> Tensor:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _drawn(self, name: str, dim: int) -> Tensor:
        """The (n, size) signs over a dimension of the weight."""
        w = self._weights[name]

        def make() -> Tensor:
            seed = draw.mix(self._probe.seeds[name], (_ROWS, _COLUMNS)[dim])
            shape = torch.Size((self.n, w.shape[dim]))
            return draw.rademacher(shape, seed, w.device).to(w.dtype)

        return self._cached(("drawn", name, dim), make)

    def shared(self, part: Part) -> Tensor:
        """S, through the same view as the weight."""
        w, block = self._weights[part.name], self.block(part.name)

        def make() -> Tensor:
            return block.repeat(*(n // m for n, m in zip(w.shape, block.shape, strict=True)))

        return part.of(self._cached(("shared", part.name), make))

    def block(self, name: str) -> Tensor:
        """The block that S repeats."""
        w = self._weights[name]
        sizes = [_block(n) for n in w.shape[:2]] if w.dim() > 1 else []

        def make() -> Tensor:
            whole = self._probe[name]
            for dim, size in enumerate(sizes):
                whole = whole.narrow(dim, 0, size)
            return whole.to(w.dtype).contiguous()

        return self._cached(("block", name), make)

    def matrix(self, slot: Slot, dim: int) -> Tensor | None:
        """The signs over a dimension of the view, (n, size); None if all of them are 1."""
        found: Tensor | None = None
        for which, place in enumerate((slot.rows, slot.columns)):
            if place is None or place[0] != dim:
                continue
            signs = self._drawn(slot.part.name, which)
            signs = signs if place[1] is None else signs[:, place[1]]
            found = signs if found is None else found * signs
        return found

    def placed(
        self, slot: Slot, dim: int, axis: Axis, like: Tensor, channel: int, times: int = 1
    ) -> Tensor:
        """The signs over ``dim`` of a weight, for ``like`` with its channels and its examples."""
        part, size, rank = slot.part, like.shape[axis.dim], like.dim()
        channel %= rank
        view = id(part) if part.path else 0
        key = ("in", part.name, view, dim, axis, size, rank, channel, times)

        def make() -> Tensor:
            signs = self.matrix(slot, dim)
            if signs is None:
                return like.new_ones([1] * rank)
            signs = self._owned(signs.repeat(1, times) if times > 1 else signs, axis, size)
            shape = [1] * rank
            shape[axis.dim], shape[channel] = signs.shape
            return (signs if axis.dim < channel else signs.t()).reshape(shape)

        return self._cached(key, make)

    def stepped(self, name: str, key: Any, signs: Tensor) -> Tensor:
        """Signs times the step, without a graph."""
        return self._cached(("out", name, key), lambda: signs * self.steps[name].detach())

    def _owned(self, signs: Tensor, axis: Axis, size: int) -> Tensor:
        """Rows for the indices along an axis from rows for the examples."""
        if axis.owner is None and axis.inner == 1 and size == self.n:
            return signs
        return signs[axis.owners(size, self.n).to(signs.device)]

    def live(self, slot: Slot | None) -> Slot | None:
        """The weight, where it has a direction for each example."""
        return slot if slot is not None and slot.part.name in self.names else None

    def spread(self, slot: Slot, axis: Axis, like: Tensor, channel: int) -> Tensor:
        """Every example's own direction of a small weight, for ``like``: from ``channel`` on, or,
        if that is -1, along the last dimensions.
        """
        part, size, rank = slot.part, like.shape[axis.dim], like.dim()
        key = ("spread", part.name, id(part) if part.path else 0, axis, size, rank, channel)

        def make() -> Tensor:
            whole = self._owned(self._whole(slot), axis, size)
            own = whole.shape[1:]
            shape = [1] * rank
            shape[axis.dim] = size
            first = rank - len(own) if channel < 0 else channel
            shape[first : first + len(own)] = own
            return whole.reshape(shape)

        return self._cached(key, make)

    def _whole(self, slot: Slot) -> Tensor:
        """Every example's own direction, (n, *shape)."""
        direction = self.shared(slot.part).unsqueeze(0)
        rank = direction.dim() - 1
        for dim in range(min(rank, 2)):
            signs = self.matrix(slot, dim)
            if signs is not None:
                shape = [self.n, *(-1 if d == dim else 1 for d in range(rank))]
                direction = direction * signs.view(shape)
        return direction
