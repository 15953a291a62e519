"""The others on the same model and batches: values and seconds of their products."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring.problems import Trained, criterion, loss_fn


@dataclass(frozen=True)
class Rival:
    """A method with one price per product of the Hessian with a vector."""

    name: str
    package: str | None
    run: Callable[[Trained, int], Sample]


@dataclass(frozen=True)
class Sample:
    """What a number of products gave."""

    products: int
    seconds: float
    estimate: float
    spread: float
    """Standard deviation of one probe (of Hutch++'s residual part)."""
    fixed: int = 0
    """Products that go into a sketch, whatever the accuracy."""

    @property
    def each(self) -> float:
        """Seconds of one product."""
        return self.seconds / self.products


def products_to(sample: Sample, trace: float, tol: float) -> float:
    """Products until the standard error is ``tol`` of the trace, extrapolated.

    A mean of probes needs (spread / error)^2 of them. Hutch++ is given the better of two laws:
    more residual probes with the sketch it has, or an error that falls like 1 / products.
    """
    wanted = tol * abs(trace)
    probes = (sample.spread / wanted) ** 2
    if not sample.fixed:
        return max(2.0, probes)
    now = sample.spread / math.sqrt(max(1, sample.products - sample.fixed))
    return min(sample.fixed + max(2.0, probes), max(sample.products * now / wanted, 6.0))


def missing(rival: Rival) -> bool:
    """Whether its package is not installed."""
    if rival.package is None:
        return False
    try:
        importlib.import_module(rival.package)
    except ImportError:
        return True
    return False


def _nested(problem: Trained, products: int) -> Sample:
    """Hutchinson by double backward, with our own safe operators."""
    from seht.measure.objective import HessianProduct, measuring

    generator = torch.Generator().manual_seed(1)
    with measuring("products", problem.model, loss_fn, problem.batches) as measurement:
        product = HessianProduct(measurement)
        return _hutchinson(product, product.size, products, generator, torch.float64)


def _hutchinson(
    product: Callable[[Any], Any], size: int, count: int, generator: torch.Generator, dtype: Any
) -> Sample:
    values, start = [], time.perf_counter()
    for _ in range(count):
        v = torch.randint(2, (size,), generator=generator).to(dtype) * 2 - 1
        values.append(float(torch.dot(v, product(v))))
    seconds = time.perf_counter() - start
    found = torch.tensor(values, dtype=torch.float64)
    return Sample(count, seconds, float(found.mean()), float(found.std()))


def _pyhessian(problem: Trained, products: int) -> Sample:
    from pyhessian import hessian

    torch.manual_seed(1)
    # It reads its parameters from gradients that are there.
    loss_fn(problem.model, problem.batches[0]).backward()
    tool = hessian(problem.model, criterion, dataloader=problem.batches, cuda=False)
    start = time.perf_counter()
    with sdpa_kernel(SDPBackend.MATH):
        # Its stop rule watches the running mean only, and stops at once where that is negative.
        found = tool.trace(maxIter=products, tol=-math.inf)
    values = torch.tensor(found, dtype=torch.float64)
    seconds = time.perf_counter() - start
    problem.model.zero_grad(set_to_none=True)
    return Sample(len(values), seconds, float(values.mean()), float(values.std()))


def _hutch_plus_plus(problem: Trained, products: int) -> Sample:
    from hessian_eigenthings import HessianOperator, hutch_plus_plus

    operator = HessianOperator(
        problem.model, problem.batches, loss_fn, param_filter=lambda name, p: p.requires_grad
    )
    third = max(2, products // 3)
    start = time.perf_counter()
    with sdpa_kernel(SDPBackend.MATH):
        found = hutch_plus_plus(operator, num_matvecs=3 * third, seed=1)
    seconds = time.perf_counter() - start
    spread = found.stderr * math.sqrt(third)
    return Sample(3 * third, seconds, found.estimate, spread, fixed=2 * third)


RIVALS = (
    Rival("nested autograd (safe operators), Hutchinson", None, _nested),
    Rival("PyHessian, Hutchinson", "pyhessian", _pyhessian),
    Rival("hessian-eigenthings, Hutch++", "hessian_eigenthings", _hutch_plus_plus),
)
