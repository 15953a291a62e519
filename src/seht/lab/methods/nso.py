"""Noise stability optimisation."""

from __future__ import annotations

from seht.estimators import SehtH as Estimator
from seht.lab.methods.checks import not_negative
from seht.lab.methods.trace import TracePenalty


class Nso(TracePenalty):
    r"""The loss averaged over weight noise, :math:`\frac12 (L(w + \sigma u) + L(w - \sigma u))`.

    Zhang, Li and Ju, arXiv 2306.08553: u Gaussian on every parameter. The difference engine with
    ``kinks="free"``, whose noise has the deviation sqrt(2 weight). The loss that is logged is that
    at :math:`w + \sigma u`.

    Args:
        sigma: the deviation of the noise.
        probes: pairs of passes in a step.
    """

    name = "nso"

    def __init__(self, *, sigma: float = 0.01, probes: int = 1) -> None:
        super().__init__(
            weight=not_negative("sigma", sigma) ** 2 / 2,
            estimator=Estimator(probes=probes, distribution="gaussian"),
            params="*",
            kinks="free",
        )

    def log(self) -> dict[str, float]:
        """Its difference is no estimate of the Hessian's trace on a network with kinks."""
        return {"penalty": super().log()["penalty"]}
