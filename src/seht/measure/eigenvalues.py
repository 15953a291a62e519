r"""The ends of the spectrum: the largest and the smallest eigenvalues of the Hessian.

SciPy's ARPACK (implicitly restarted Lanczos; Lehoucq, Sorensen and Yang, *ARPACK Users' Guide*,
1998) on Hessian-vector products over the whole data set. For each eigenpair the residual
:math:`r = |Hv - \lambda v|` is measured with one more product; as H is symmetric an eigenvalue lies
within r of :math:`\lambda`. With few products to spend, one Krylov space serves both ends
(:mod:`seht.measure.krylov`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seht.errors import unknown
from seht.extras import need
from seht.measure.data import check_count
from seht.measure.keep import unit_normal
from seht.measure.krylov import Pairs, both_ends, lanczos
from seht.measure.numbers import duration, number, said
from seht.measure.objective import (
    CurvatureOptions,
    HessianProduct,
    LossFn,
    Measurement,
    measuring,
)
from seht.measure.progress import Reporter
from seht.measure.results import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

SOLVERS = ("arpack", "lanczos")
_LOOK = 8
"""Lanczos steps for a first look at the size of the spectrum."""
_DENSE = 60
"""Up to so many weights the whole matrix is made: ARPACK needs room."""


@dataclass(frozen=True)
class EigenvaluesResult(Result):
    """The ends of the spectrum; ``residuals`` bound the error of each value."""

    largest: tuple[float, ...]
    """Descending."""
    smallest: tuple[float, ...]
    """Ascending: the most negative first."""
    largest_residuals: tuple[float, ...]
    smallest_residuals: tuple[float, ...]
    converged: bool
    """Whether every value asked for was found to the tolerance."""
    products: int
    """Hessian-vector products over the whole data."""
    samples: int
    weights: int
    weight_norm: float
    seconds: float
    curvature: str = "hessian"
    differences: bool = False
    """Whether products were made by differences (an operator has no second derivative)."""
    vectors: Tensor | None = None
    """Eigenvectors as rows, first those of ``largest``, then of ``smallest``; if asked for."""

    def __str__(self) -> str:
        """A table of the values with the bounds of their errors."""
        matrix = "Gauss-Newton matrix" if self.curvature == "ggn" else "Hessian"
        title = (
            f"eigenvalues of the {matrix} ({self.weights:,} weights) on {self.samples:,} samples, "
            f"{self.products} products, {duration(self.seconds)}"
        )
        if not self.converged:
            title += "; not all were found to the tolerance"
        rows = [("", "eigenvalue", "error at most")]
        ends = (
            ("largest", self.largest, self.largest_residuals),
            ("smallest", self.smallest, self.smallest_residuals),
        )
        for name, values, errors in ends:
            for place, (value, error) in enumerate(zip(values, errors, strict=True), 1):
                rows.append((f"{name} {place}", number(value, 4), number(error, 2)))
        return said(title, rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the vectors."""
        return {key: value for key, value in super().as_dict().items() if key != "vectors"}


def eigenvalues(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    largest: int = 5,
    smallest: int = 1,
    tol: float = 1e-4,
    max_products: int = 500,
    vectors: bool = False,
    solver: str = "arpack",
    **options: Unpack[CurvatureOptions],
) -> EigenvaluesResult:
    """The ``largest`` and ``smallest`` eigenvalues of the Hessian of the data's mean loss.

    The λ of H v = λ v, each with a residual that bounds its error.

    Cost: a Hessian-vector product (two gradients) over the data for each step of the solver.

    Example:
        ```python
        found = seht.measure.eigenvalues(model, loss_fn, batch, largest=2, solver="lanczos")
        print(found.largest, found.smallest)
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: what it is measured on; every product reads all of it.
        largest: how many at the upper end.
        smallest: how many at the lower end.
        tol: the accuracy asked of ARPACK, relative to the size of the spectrum; of Lanczos,
            relative to each eigenvalue (or a thousandth of the spectrum, if that is more).
        max_products: give up after so many products at each end, with ``converged`` False.
        vectors: return the eigenvectors, too.
        solver: ``"arpack"``, or ``"lanczos"``: one space for both ends, whose basis is kept. That
            is for a few dozen products in all, and has values, if only bounds, also where it gives
            up: the largest eigenvalue is at least, the smallest at most what it says.
        options: ``curvature``, ``boundary``, ``seed`` (of the start vector), ``progress``,
            ``params``, ``micro_batch``, ``batch_dim`` and ``limit``, as in
            :func:`seht.measure.trace`.
    """
    check_search(largest, smallest, max_products, solver)
    with measuring("eigenvalues", model, loss_fn, data, **options) as m:
        return ends(m, largest, smallest, tol, max_products, solver, vectors)


def check_search(largest: int, smallest: int, max_products: int, solver: str) -> None:
    """Refuse what cannot be searched for, before anything is measured."""
    check_count("largest", largest, 0, optional=False)
    check_count("smallest", smallest, 0, optional=False)
    check_count("max_products", max_products, optional=False)
    if largest + smallest == 0:
        raise ValueError("largest and smallest are both 0: ask for at least one eigenvalue")
    if solver not in SOLVERS:
        raise ValueError(unknown("solver", solver, SOLVERS))
    if solver == "arpack":
        need("measure", "eigenvalues", "scipy")


def ends(
    m: Measurement, largest: int, smallest: int, tol: float, most: int, solver: str, vectors: bool
) -> EigenvaluesResult:
    """The ends of a measurement's spectrum."""
    product = HessianProduct(m)
    largest, smallest = min(largest, m.size), min(smallest, m.size)
    start = unit_normal(torch.Size([m.size]), m.seed, 12)
    rest = (start, largest, smallest, tol, most, m.tell)
    if m.size <= max(_DENSE, 2 * largest + 2, 2 * smallest + 2):
        pairs, converged = _dense(product, largest, smallest, m.tell)
    elif solver == "lanczos":
        pairs, converged = both_ends(product, *rest)
    else:
        pairs, converged = _restarted(product, *rest)
    top, low = (
        sorted(
            ((value, float((product(v) - value * v).norm()), v) for value, v in end),
            key=lambda item: sign * item[0],
        )
        for sign, end in zip((-1, 1), pairs, strict=True)
    )
    rows = [v for _, _, v in top + low]
    return EigenvaluesResult(
        largest=tuple(value for value, _, _ in top),
        smallest=tuple(value for value, _, _ in low),
        largest_residuals=tuple(residual for _, residual, _ in top),
        smallest_residuals=tuple(residual for _, residual, _ in low),
        converged=converged,
        products=product.count,
        samples=m.samples,
        weights=m.size,
        weight_norm=m.objective.weight_norm,
        seconds=m.seconds,
        curvature=m.objective.curvature,
        differences=product.differences,
        vectors=torch.stack(rows) if vectors and rows else None,
    )


def _dense(
    product: HessianProduct, largest: int, smallest: int, reporter: Reporter
) -> tuple[tuple[Pairs, Pairs], bool]:
    rows = []
    for i, unit in enumerate(torch.eye(product.size, dtype=torch.float64)):
        rows.append(product(unit))
        reporter(i + 1, product.size)
    matrix = torch.stack(rows)
    values, columns = torch.linalg.eigh((matrix + matrix.T) / 2)
    pairs = [(float(value), columns[:, i].clone()) for i, value in enumerate(values)]
    return (pairs[::-1][:largest], pairs[:smallest]), True


def _restarted(
    product: HessianProduct,
    start: Tensor,
    largest: int,
    smallest: int,
    tol: float,
    most: int,
    reporter: Reporter,
) -> tuple[tuple[Pairs, Pairs], bool]:
    """One run of ARPACK for each end."""
    # ARPACK's tolerance is relative to the eigenvalue, and many are 0: shifted by the size of the
    # spectrum it is relative to that.
    scale = float(lanczos(product, start, _LOOK)[0].abs().max())
    rest = (start, tol, most, reporter)
    top, whole = _arpack(product, largest, "LA", scale, *rest)
    low, both = _arpack(product, smallest, "SA", -scale, *rest)
    return (top, low), whole and both


def _arpack(
    product: HessianProduct,
    count: int,
    which: str,
    shift: float,
    start: Tensor,
    tol: float,
    most: int,
    reporter: Reporter,
) -> tuple[Pairs, bool]:
    if count == 0:
        return [], True
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    def matvec(vector: Any) -> Any:
        v = torch.from_numpy(vector.reshape(-1).copy())
        found = product(v) + shift * v
        reporter(product.count)
        return found.numpy()

    size = product.size
    operator = LinearOperator((size, size), matvec=matvec, dtype="float64")
    basis = min(size - 1, max(2 * count + 1, 20))
    restarts = max(1, (most - basis) // (basis - count))
    try:
        values, columns = eigsh(
            operator, k=count, which=which, v0=start.numpy(), tol=tol, ncv=basis, maxiter=restarts
        )
        converged = True
    except ArpackNoConvergence as error:
        values, columns, converged = error.eigenvalues, error.eigenvectors, False
    pairs = [
        (float(v) - shift, torch.from_numpy(columns[:, i].copy())) for i, v in enumerate(values)
    ]
    return pairs, converged
