"""SEHT-H, the paper's Algorithm 1."""

from __future__ import annotations

from seht.estimators import SehtH as Estimator
from seht.lab.methods.trace import TracePenalty


class SehtH(TracePenalty):
    r"""SEHT-H: :math:`L + \lambda \frac1K \sum_k \sigma_k^T H \sigma_k`, signs on every weight.

    Liu, Yu and Lin, arXiv 2208.05924, Algorithm 1. ``weight`` 1e-3 is the paper's for CIFAR-10
    (there with 5 probes). ``curvature="ggn"`` takes the Gauss-Newton part: bounded below, cheaper.

    Args:
        weight: lambda.
        probes: K, the paper's maxIter.
        distribution: rademacher or gaussian.
        curvature: hessian or ggn.
        params: a glob pattern of tensors; all of two or more dimensions if not given.
        every: penalise each k-th step, at k times the weight.
        warmup: plain steps before the first penalised one, or a fraction of the training.
        ramp: steps, or a fraction of the training, over which the weight grows.
        limit: the largest ratio of penalty to loss.
        engine: auto, difference or autograd.
        on_nonfinite: raise or skip.
        kappa: the difference engine's relative step, adapted if not given.
        two_sided: a second-order ggn.
    """

    name = "seht-h"

    def __init__(
        self,
        *,
        weight: float = 1e-3,
        probes: int = 1,
        distribution: str = "rademacher",
        curvature: str = "hessian",
        params: str | None = None,
        every: int = 1,
        warmup: int | float = 0,
        ramp: int | float = 0,
        limit: float | None = None,
        engine: str = "auto",
        on_nonfinite: str = "raise",
        kappa: float | None = None,
        two_sided: bool = False,
    ) -> None:
        super().__init__(
            weight=weight,
            estimator=Estimator(probes=probes, distribution=distribution),
            curvature=curvature,
            params=params,
            every=every,
            warmup=warmup,
            ramp=ramp,
            limit=limit,
            engine=engine,
            on_nonfinite=on_nonfinite,
            kappa=kappa,
            two_sided=two_sided,
        )
