r"""The ends of the spectrum: the largest and the smallest eigenvalues of the Hessian.

For each eigenpair the residual :math:`r = |Hv - \lambda v|` is measured with one more product; as H
is symmetric an eigenvalue lies within r of :math:`\lambda`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from seht.errors import check_count, check_options, check_positive, unknown
from seht.extras import need
from seht.measure.keep import unit_normal
from seht.measure.krylov import Pairs, both_ends, lanczos
from seht.measure.numbers import duration, number, said
from seht.measure.objective import CurvatureOptions, HessianProduct, Measurement, measuring
from seht.measure.progress import Reporter
from seht.measure.results import PlainResult
from seht.task import LossFn

SOLVERS = ("arpack", "lanczos")
_LOOK = 8
"""Lanczos steps for a first look at the size of the spectrum."""
_DENSE = 60
"""Up to so many weights the whole matrix is made: ARPACK needs room."""


@dataclass(frozen=True)
class EigenvaluesResult(PlainResult):
    """The ends of the spectrum; an eigenvalue lies within its residual of each value."""

    largest: tuple[float, ...]
    """The largest eigenvalues, in descending order."""
    smallest: tuple[float, ...]
    """The smallest ones, in ascending order: the most negative first."""
    largest_residuals: tuple[float, ...]
    smallest_residuals: tuple[float, ...]
    converged: bool
    """Whether every value asked for was found to the tolerance."""
    products: int
    """How many Hessian-vector products over the whole data it took."""
    samples: int
    weights: int
    weight_norm: float
    seconds: float
    curvature: str = "hessian"
    differences: bool = False
    """Whether products are differences of gradients: an operator has no second derivative."""
    vectors: Tensor | None = None
    """With ``vectors=True``, eigenvectors as rows: those of ``largest``, then of ``smallest``."""

    def __str__(self) -> str:
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

    The λ of H v = λ v, each with its residual |H v − λ v|, which bounds its error. By ARPACK
    (Lehoucq, Sorensen and Yang, *ARPACK Users' Guide*, 1998), which needs SciPy, or by Lanczos.

    Cost: a Hessian-vector product (two gradients) over the data for each step of the solver, and
    one for each residual.

    Example:
        ```python
        found = seht.measure.eigenvalues(model, loss_fn, batch, largest=2, solver="lanczos")
        print(found.largest, found.smallest)
        ```

    Args:
        model: as in :func:`seht.measure.trace`, and so are ``loss_fn`` and ``data``.
        loss_fn: the mean loss of a batch.
        data: the data to measure on; every product reads all of it.
        largest: how many eigenvalues at the upper end.
        smallest: how many at the lower end.
        tol: the relative accuracy. For ARPACK it is relative to the size of the spectrum, for
            Lanczos to each eigenvalue (or to a thousandth of the spectrum, if that is more).
        max_products: give up after this many products at each end, with ``converged`` False.
        vectors: return the eigenvectors, too.
        solver: ``"arpack"``, or ``"lanczos"``, which searches both ends in one Krylov space and
            keeps its basis in memory. Lanczos is for a few dozen products in all. If it gives up,
            its values are still bounds: the largest eigenvalue is at least as large as it says,
            the smallest at most.
        options: ``curvature``, ``boundary``, ``seed`` (of the start vector), ``progress``,
            ``params``, ``micro_batch``, ``batch_dim`` and ``limit``, as in
            :func:`seht.measure.trace`.
    """
    check_options(eigenvalues, options, CurvatureOptions.__annotations__)
    search = Search(largest, smallest, tol, max_products, solver)
    with measuring("eigenvalues", model, loss_fn, data, **options) as m:
        return search(m, vectors)


@dataclass(frozen=True)
class Search:
    """Which eigenvalues to search for, how accurately and with which solver."""

    largest: int
    smallest: int
    tol: float
    most: int
    """Products at each end."""
    solver: str

    def __post_init__(self) -> None:
        check_count("largest", self.largest, 0)
        check_count("smallest", self.smallest, 0)
        check_count("max_products", self.most)
        if self.tol != 0:  # as far as rounding lets it
            check_positive("tol", self.tol)
        if self.largest + self.smallest == 0:
            raise ValueError("largest and smallest are both 0: ask for at least one eigenvalue")
        if self.solver not in SOLVERS:
            raise ValueError(unknown("solver", self.solver, SOLVERS))
        if self.solver == "arpack":
            need("measure", "eigenvalues", "scipy")

    def __call__(self, m: Measurement, vectors: bool = False) -> EigenvaluesResult:
        """The ends of a measurement's spectrum."""
        product = HessianProduct(m)
        largest, smallest = min(self.largest, m.size), min(self.smallest, m.size)
        start = unit_normal(torch.Size([m.size]), m.seed, 12)
        if m.size <= max(_DENSE, 2 * largest + 2, 2 * smallest + 2):
            ends, converged = _dense(product, largest, smallest, m.tell)
        elif self.solver == "lanczos":
            rest = (largest, smallest, self.tol, self.most, m.tell)
            ends, converged = both_ends(product, start, *rest)
        else:
            # ARPACK's tolerance is relative to the eigenvalue, and many are 0: shifted by the size
            # of the spectrum it is relative to that.
            scale = float(lanczos(product, start, _LOOK)[0].abs().max())
            top, whole = self._arpack(product, largest, "LA", scale, start, m.tell)
            low, both = self._arpack(product, smallest, "SA", -scale, start, m.tell)
            ends, converged = (top, low), whole and both
        found = [
            (value, float((product(v) - value * v).norm()), v) for end in ends for value, v in end
        ]
        upper = sorted(found[: len(ends[0])], key=lambda item: -item[0])
        lower = sorted(found[len(ends[0]) :], key=lambda item: item[0])
        return EigenvaluesResult(
            largest=tuple(value for value, _, _ in upper),
            smallest=tuple(value for value, _, _ in lower),
            largest_residuals=tuple(residual for _, residual, _ in upper),
            smallest_residuals=tuple(residual for _, residual, _ in lower),
            converged=converged,
            products=product.count,
            samples=m.samples,
            weights=m.size,
            weight_norm=m.objective.weight_norm,
            seconds=m.seconds,
            curvature=m.objective.curvature,
            differences=product.differences,
            vectors=torch.stack([v for _, _, v in upper + lower]) if vectors and found else None,
        )

    def _arpack(
        self,
        product: HessianProduct,
        count: int,
        which: str,
        shift: float,
        start: Tensor,
        tell: Reporter,
    ) -> tuple[Pairs, bool]:
        if count == 0:
            return [], True
        from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

        def matvec(vector: Any) -> Any:
            v = torch.from_numpy(vector.reshape(-1).copy())
            found = product(v) + shift * v
            tell(product.count)
            return found.numpy()

        size = product.size
        operator = LinearOperator((size, size), matvec=matvec, dtype="float64")
        basis = min(size - 1, max(2 * count + 1, 20))
        limits = {"tol": self.tol, "maxiter": max(1, (self.most - basis) // (basis - count))}
        converged = True
        try:
            values, columns = eigsh(
                operator, k=count, which=which, v0=start.numpy(), ncv=basis, **limits
            )
        except ArpackNoConvergence as error:
            values, columns, converged = error.eigenvalues, error.eigenvectors, False
        vectors = [torch.from_numpy(columns[:, i].copy()) for i in range(len(values))]
        return [(float(v) - shift, w) for v, w in zip(values, vectors, strict=True)], converged


def _dense(
    product: HessianProduct, largest: int, smallest: int, tell: Reporter
) -> tuple[tuple[Pairs, Pairs], bool]:
    rows = []
    for i, unit in enumerate(torch.eye(product.size, dtype=torch.float64)):
        rows.append(product(unit))
        tell(i + 1, product.size)
    matrix = torch.stack(rows)
    values, columns = torch.linalg.eigh((matrix + matrix.T) / 2)
    pairs = [(float(value), columns[:, i].clone()) for i, value in enumerate(values)]
    return (pairs[::-1][:largest], pairs[:smallest]), True
