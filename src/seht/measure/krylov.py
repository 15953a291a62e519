r"""One Krylov space for both ends of the spectrum.

The Lanczos recurrence with full reorthogonalisation: after k products the orthonormal basis
:math:`V` of :math:`\mathrm{span}(v, Hv, \dots, H^{k-1}v)` makes :math:`V^T H V = T` tridiagonal,
and T's eigenpairs :math:`(\theta, s)` give pairs :math:`(\theta, Vs)` with the residual
:math:`\beta_k |s_k|` (Parlett, *The Symmetric Eigenvalue Problem*, chapter 13). Both ends grow in
the same space, so that a few dozen products are enough where ARPACK's restarts want a space for
each; the price is a basis as long as the search.

A :math:`\theta` is a Rayleigh quotient: whether or not it has converged, the largest eigenvalue is
at least the largest, and the smallest at most the smallest of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_EVERY = 5
"""Products between two looks at the residuals."""
_SMALL = 1e-3
"""An eigenvalue below this share of the spectrum's size is wanted to that share's accuracy only."""

Pairs = list[tuple[float, Tensor]]


class Krylov:
    """The space that a start vector and a symmetric operator span, one product at a time."""

    def __init__(self, product: Callable[[Tensor], Tensor], start: Tensor) -> None:
        self.product = product
        self.basis = [start / start.norm()]
        self.alphas: list[Tensor] = []
        self.betas: list[Tensor] = []
        self.closed = False
        """Whether the space is invariant: its values are eigenvalues."""

    def __len__(self) -> int:
        """Products so far."""
        return len(self.alphas)

    def grow(self) -> None:
        """One product more."""
        v = self.basis[-1]
        u = self.product(v)
        self.alphas.append(torch.dot(u, v))
        for _ in range(2):  # once is not enough where much cancels
            for other in self.basis:  # one by one: a stack would be the basis in memory again
                u = u - torch.dot(other, u) * other
        size = u.norm()
        scale = max(1e-30, float(torch.stack(self.alphas).abs().max()))
        self.closed = len(self) == len(v) or bool(size <= 1e-10 * scale)
        self.betas.append(size)
        if not self.closed:
            self.basis.append(u / size)

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values ascending, their vectors in the basis as columns, their residuals."""
        matrix = torch.diag(torch.stack(self.alphas))
        if len(self) > 1:
            off = torch.stack(self.betas[: len(self) - 1])
            matrix = matrix + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        beta = torch.zeros_like(self.betas[-1]) if self.closed else self.betas[-1]
        return values, vectors, beta * vectors[-1].abs()

    def vector(self, column: Tensor) -> Tensor:
        """The full vector of given coordinates in the basis, with norm 1."""
        found = torch.zeros_like(self.basis[0])
        for part, v in zip(column.tolist(), self.basis, strict=False):  # one ahead
            found += part * v
        return found / found.norm()


def lanczos(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss quadrature that a start vector sees."""
    krylov = Krylov(product, start)
    while len(krylov) < steps and not krylov.closed:
        krylov.grow()
        tell(len(krylov))
    values, vectors, _ = krylov.ritz()
    return values, vectors[0].square()


def both_ends(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    largest: int,
    smallest: int,
    tol: float,
    most: int,
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[tuple[Pairs, Pairs], bool]:
    """The outermost pairs after at most that many products, and whether they are found to ``tol``.

    An eigenvalue is found when its residual is at most ``tol`` times its own size, or times a
    thousandth of the largest if that is more.
    """
    krylov = Krylov(product, start)
    least = largest + smallest
    while True:
        krylov.grow()
        done = len(krylov)
        tell(done)
        last = krylov.closed or done >= most
        if not last and (done < least or done % _EVERY):
            continue
        values, vectors, residuals = krylov.ritz()
        top = range(max(0, done - largest), done)
        low = range(min(smallest, done))
        sizes = values.abs().clamp(min=_SMALL * float(values.abs().max()))
        found = bool((residuals <= tol * sizes)[[*top, *low]].all())
        if last or found:
            break
    pairs = [[(float(values[i]), krylov.vector(vectors[:, i])) for i in end] for end in (top, low)]
    whole = len(pairs[0]) == largest and len(pairs[1]) == smallest
    return (pairs[0], pairs[1]), found and whole
