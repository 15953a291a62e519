r"""The signs of per-sample probes, and the product that applies them.

The probe of example n in a weight is :math:`s_n = S \circ r_n q_n^T`: one shared Rademacher
:math:`S` with a sign vector over the weight's first dimension and one over its second, drawn for
each example (the flipout device, arXiv 1803.04386). Each :math:`s_n` is Rademacher, and a layer at
:math:`W + e s_n` costs one product more:

.. math:: (W + e\,s_n) x = W x + e\, r_n \circ (S (q_n \circ x)) .
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seht import probes as draw
from seht.engines.base import Probe
from seht.engines.persample.axes import Axis
from seht.engines.persample.weights import Part

_ROWS, _COLUMNS = 11, 12


class Factors(NamedTuple):
    """Along which dimension of a (view of a) weight r and q lie, and in which order."""

    rows: tuple[int, Tensor | None]
    columns: tuple[int, Tensor | None] | None


def factorise(part: Part, weight: Tensor) -> Factors | None:
    """How the signs of a weight lie in a view of it; None if they are no product there."""
    if not part.path:
        return Factors((0, None), (1, None) if weight.dim() > 1 else None)
    rows = _line(part, weight, 0)
    columns = _line(part, weight, 1) if weight.dim() > 1 else None
    if rows is None or (weight.dim() > 1 and columns is None):
        return None
    return Factors(rows, columns)


def _line(part: Part, weight: Tensor, dim: int) -> tuple[int, Tensor] | None:
    ones = [-1 if d == dim else 1 for d in range(weight.dim())]
    places = torch.arange(weight.shape[dim], device=weight.device).view(ones)
    view = part.of(places.expand(weight.shape))
    varying = [d for d in range(view.dim()) if not bool((view.narrow(d, 0, 1) == view).all())] or [
        0
    ]
    if len(varying) > 1 or view.dim() == 0:
        return None
    for d in range(view.dim()):
        if d != varying[0]:
            view = view.narrow(d, 0, 1)
    return varying[0], view.reshape(-1)


class Signs:
    """One probe at one distance: the shared part, the signs of each example, the step."""

    def __init__(self, probe: Probe, weights: dict[str, Tensor], n: int, names: set[str]) -> None:
        self.names = names
        """The weights with a direction for each example."""
        self.n = n
        self.frugal = False
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
        """S, seen as the weight is."""
        w = self._weights[part.name]
        whole = self._cached(("shared", part.name), lambda: self._probe[part.name].to(w.dtype))
        return part.of(whole)

    def matrix(self, part: Part, factors: Factors, dim: int) -> Tensor | None:
        """The signs over a dimension of the view, (n, size); None where they are all one."""
        found: Tensor | None = None
        for which, place in enumerate((factors.rows, factors.columns)):
            if place is None or place[0] != dim:
                continue
            signs = self._drawn(part.name, which)
            signs = signs if place[1] is None else signs[:, place[1]]
            found = signs if found is None else found * signs
        return found

    def placed(
        self, part: Part, factors: Factors, dim: int, axis: Axis, like: Tensor, channel: int,
        times: int = 1,
    ) -> Tensor:  # fmt: skip
        """The signs over ``dim`` of a weight, for ``like`` with its channels and its examples."""
        size, rank = like.shape[axis.dim], like.dim()
        channel %= rank
        view = id(part) if part.path else 0
        key = ("in", part.name, view, dim, axis, size, rank, channel, times)

        def make() -> Tensor:
            signs = self.matrix(part, factors, dim)
            if signs is None:
                return like.new_ones([1] * rank)
            signs = self.owned(signs.repeat(1, times) if times > 1 else signs, axis, size)
            shape = [1] * rank
            shape[axis.dim], shape[channel] = signs.shape
            return (signs if axis.dim < channel else signs.t()).reshape(shape)

        return self._cached(key, make)

    def stepped(self, name: str, key: Any, signs: Tensor) -> Tensor:
        """Signs times the step, without a graph."""
        return self._cached(("out", name, key), lambda: signs * self.steps[name].detach())

    def owned(self, signs: Tensor, axis: Axis, size: int) -> Tensor:
        """Rows for the indices along an axis from rows for the examples."""
        if axis.owner is None and axis.inner == 1 and size == self.n:
            return signs
        return signs[axis.owners(size, self.n).to(signs.device)]

    def whole(self, part: Part, factors: Factors) -> Tensor:
        """Every example's own direction, (n, *shape): for small weights."""
        direction = self.shared(part).unsqueeze(0)
        rank = direction.dim() - 1
        for dim in range(min(rank, 2)):
            signs = self.matrix(part, factors, dim)
            if signs is not None:
                shape = [self.n, *(-1 if d == dim else 1 for d in range(rank))]
                direction = direction * signs.view(shape)
        return direction


class Linear(NamedTuple):
    """x W^T + b."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The product."""
        return F.linear(x, w, b)

    def backward(self, g: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> list[Any]:
        """The gradients in x, W and b that are wanted."""
        rows = g.reshape(-1, g.shape[-1])
        return [
            g @ w if wanted[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        ]


class Convolution(NamedTuple):
    """Any convolution, transposed ones included."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The convolution."""
        return torch.convolution(x, w, b, *self)

    def backward(self, g: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> list[Any]:
        """The gradients in x, W and b that are wanted."""
        out = w.shape[1] * self.groups if self.transposed else w.shape[0]
        return list(torch.ops.aten.convolution_backward(g, x, w, [out], *self, wanted))


class Perturbed(torch.autograd.Function):
    """The product at W + e S r q^T, with the gradients in x, W, b and e.

    By hand, because autograd would keep the signed input as well, and because the gradient in e
    comes for one inner product: <g, r S(q x)> = <q S^T(r g), x>.
    """

    @staticmethod
    def forward(
        ctx: Any, op: Any, x: Tensor, w: Tensor, b: Tensor | None, shared: Tensor,
        into: Tensor, out: Tensor, e: Tensor,
    ) -> Tensor:  # fmt: skip
        """Two products; ``out`` has the step in it."""
        y: Tensor = op.forward(x, w, b)
        y.add_(op.forward(x * into, shared, None).mul_(out))
        ctx.op, ctx.bias = op, b is not None
        ctx.save_for_backward(x, w, shared, into, out, e)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Three products as ever, and one more."""
        x, w, shared, into, out, e = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [needs[1], needs[2], ctx.bias and needs[3]]
        gx, gw, gb = ctx.op.backward(g, x, w, wanted)
        ge = None
        if needs[1] or needs[7]:
            (more, _, _) = ctx.op.backward(g * out, x, shared, [True, False, False])
            more.mul_(into)
            if needs[7]:
                ge = torch.dot(more.reshape(-1), x.reshape(-1)) / e
            if needs[1]:
                gx.add_(more)
        return None, gx, gw, gb, None, None, None, ge


def frugal_product(
    op: Any, x: Tensor, w: Tensor, b: Tensor | None, shared: Tensor, into: Tensor, out: Tensor
) -> Tensor:
    """The same value without gradients, the second product in pieces."""
    y: Tensor = op.forward(x, w, b)
    count = len(x)
    piece = max(1, -(-count // 8))

    def cut(t: Tensor, start: int) -> Tensor:
        return t[start : start + piece] if t.shape[0] == count else t

    for start in range(0, count, piece):
        rows = x[start : start + piece] * cut(into, start)
        y[start : start + piece].add_(op.forward(rows, shared, None).mul_(cut(out, start)))
    return y
