"""SEHT-D, the paper's Algorithm 2."""

from __future__ import annotations

from seht.estimators import SehtD as Estimator
from seht.lab.methods.trace import TracePenalty


class SehtD(TracePenalty):
    r"""SEHT-D: SEHT-H with layers and entries left out; it estimates :math:`2 p^2 \mathrm{tr}(H)`.

    Liu, Yu and Lin, arXiv 2208.05924, Algorithm 2. The defaults are the paper's for CIFAR-10; as
    there, the estimate is not rescaled, which makes it 200 times weaker than SEHT-H at p = 0.05.

    Args:
        weight: lambda.
        probes: K, the paper's maxIter.
        prob: p, the probability of each sign, and of a layer unless ``layer_prob`` is given.
        layer_prob: the probability that a layer takes part.
        rescale: divide by 2 p1 p2, unbiased for the trace.
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

    name = "seht-d"

    def __init__(
        self,
        *,
        weight: float = 1e-3,
        probes: int = 1,
        prob: float = 0.05,
        layer_prob: float | None = None,
        rescale: bool = False,
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
        estimator = Estimator(
            probes=probes,
            prob=prob,
            layer_prob=layer_prob,
            rescale=rescale,
            distribution=distribution,
        )
        super().__init__(
            weight=weight,
            estimator=estimator,
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
