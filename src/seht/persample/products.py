r"""Linear maps and convolutions at a direction for each example: W x + e r (S (q x)).

Where S repeats a block, the second product is one of the block alone (``Folded``): the pieces of
q x are added up, and every piece of the output has the same values before r takes its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """x W^T + b."""

    channel, groups, transposed = -1, 1, False
    """``channel`` is the dimension that meets the weight."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The product."""
        return F.linear(x, w, b)

    def backward(self, g: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> list[Any]:
        """The gradients in x, W and b that are wanted."""
        rows = g.reshape(-1, g.shape[-1])
        return [
            self.back(g, x, w) if wanted[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        ]

    def back(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """The gradient in x alone."""
        return g @ w


_FEW = 16
"""With fewer channels a CPU is faster by a convolution with the kernel turned: 5 ms in place of 16
for 128 examples, 8 channels, 32 x 32."""


class Convolution(NamedTuple):
    """Any convolution, transposed ones included."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @property
    def channel(self) -> int:
        """The dimension that meets the weight."""
        return 1

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The convolution."""
        return torch.convolution(x, w, b, *self)

    def backward(self, g: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> list[Any]:
        """The gradients in x, W and b that are wanted."""
        out = w.shape[1] * self.groups if self.transposed else w.shape[0]
        return list(torch.ops.aten.convolution_backward(g, x, w, [out], *self, wanted))

    def back(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """The gradient in x alone."""
        sizes = zip(self.padding, self.dilation, w.shape[2:], strict=True)
        padding = [d * (k - 1) - p for p, d, k in sizes]
        plain = not self.transposed and self.groups == 1 and set(self.stride) == {1}
        few = g.device.type == "cpu" and max(w.shape[:2]) < _FEW
        if not (plain and few) or min(padding) < 0:
            (found, _, _) = self.backward(g, x, w, [True, False, False])
            return found
        turned = w.transpose(0, 1).flip(*range(2, w.dim())).contiguous()
        return self._replace(padding=padding).forward(g, turned, None)


class Signed(NamedTuple):
    """The second product, out * S(into * x), with the whole of S."""

    op: Any
    shared: Tensor
    into: Tensor
    out: Tensor
    """r, the signs of the outputs, times the step."""

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add it to the first one."""
        y.add_(self.op.forward(x * self.into, self.shared, None).mul_(self.out))

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        """Its gradient in x."""
        found: Tensor = self.op.back(g * self.out, x, self.shared).mul_(self.into)
        return found

    def rows(self, part: slice, count: int) -> Signed:
        """The same for some of the examples."""
        into, out = (t[part] if len(t) == count else t for t in (self.into, self.out))
        return self._replace(into=into, out=out)


class Folded(Signed):
    """The second product with the block that S repeats in place of S."""

    __slots__ = ()

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add it to the first one."""
        rows, columns = self.shared.shape[:2]
        small = self.op.forward(self._fold(x * self.into, columns), self.shared, None)
        at = self._place(y)
        self._pieces(y, rows).addcmul_(small.unsqueeze(at), self._pieces(self.out, rows))

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        """Its gradient in x."""
        rows, columns = self.shared.shape[:2]
        small = self._fold(g * self.out, rows)
        like = x.narrow(self.op.channel, 0, columns)  # for its shape
        more = self.op.back(small, like, self.shared)
        at = self._place(x)
        return (more.unsqueeze(at) * self._pieces(self.into, columns)).flatten(at, at + 1)

    def _place(self, t: Tensor) -> int:
        return int(self.op.channel) % t.dim()

    def _pieces(self, t: Tensor, size: int) -> Tensor:
        at = self._place(t)
        return t.unflatten(at, (t.shape[at] // size, size))

    def _fold(self, t: Tensor, size: int) -> Tensor:
        at = self._place(t)
        return t if t.shape[at] == size else self._pieces(t, size).sum(at)


_WORTH = 1 << 17
"""Small inputs (51,000 numbers in the digits' network) lose more by the sums than they save."""


def second(
    op: Any, x: Tensor, block: Tensor | None, whole: Callable[[], Tensor], into: Tensor, out: Tensor
) -> Signed:
    """The form of the second product that fits.

    ``block`` is what S repeats, None where there is no telling; ``whole`` makes all of S.
    """
    plain = op.groups == 1 and not op.transposed
    if block is None or not plain or x.numel() < _WORTH:
        return Signed(op, whole(), into, out)
    return Folded(op, block, into, out)


class PerturbedProduct(torch.autograd.Function):
    """The product at W + e S r q^T, with the gradients in x, W, b and e.

    By hand, because autograd would keep the signed input as well, and because the gradient in e
    comes for one inner product: <g, r S(q x)> = <q S^T(r g), x>.
    """

    @staticmethod
    def forward(
        ctx: Any, op: Any, x: Tensor, w: Tensor, b: Tensor | None, signed: Signed, e: Tensor
    ) -> Tensor:
        """Two products."""
        y: Tensor = op.forward(x, w, b)
        signed.add_to(y, x)
        ctx.op, ctx.signed = op, signed
        ctx.save_for_backward(x, w, b, e)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Three products as ever, and one more."""
        x, w, b, e = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated again, which the products below are not
            y = plain_product(ctx.op, x, w, b, ctx.signed, e)
            given = zip((None, x, w, b, None, e), needs, strict=True)
            picked = [t for t, need in given if need]
            found = iter(torch.autograd.grad(y, picked, g, create_graph=True, allow_unused=True))
            return tuple(next(found) if need else None for need in needs)
        gx, gw, gb = ctx.op.backward(g, x, w, list(needs[1:4]))
        ge = None
        if needs[1] or needs[5]:
            more = ctx.signed.back(g, x)
            if needs[5]:
                ge = torch.dot(more.reshape(-1), x.reshape(-1)) / e
            if needs[1]:
                gx.add_(more)
        return None, gx, gw, gb, None, ge


def plain_product(
    op: Any, x: Tensor, w: Tensor, b: Tensor | None, signed: Signed, e: Tensor
) -> Tensor:
    """The same by operations that can be differentiated any number of times."""
    y: Tensor = op.forward(x, w, b)
    more = torch.zeros_like(y)
    signed.add_to(more, x)
    return y + more * (e / e.detach())


def frugal_product(op: Any, x: Tensor, w: Tensor, b: Tensor | None, signed: Signed) -> Tensor:
    """The same value without gradients, the second product in two halves, to save memory: more
    pieces save no more of it, and cost time.
    """
    y: Tensor = op.forward(x, w, b)
    half = max(1, -(-len(x) // 2))
    for start in range(0, len(x), half):
        part = slice(start, start + half)
        signed.rows(part, len(x)).add_to(y[part], x[part])
    return y
