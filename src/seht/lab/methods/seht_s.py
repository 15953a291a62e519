"""SEHT-S: a probe for every example, past the paper."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from seht.estimators import SehtS as Estimator
from seht.lab.methods.base import Run
from seht.lab.methods.trace import TracePenalty


class SehtS(TracePenalty):
    r"""SEHT-S: :math:`L + \lambda \sum_n s_n^T H_n s_n`, a probe of its own for each example n.

    As unbiased as SEHT-H, with an error that falls with the number of examples. They must not meet
    before the loss: with BatchNorm choose ``--model.norm group``, or ``coupling=frozen``, which
    holds the batch statistics and estimates the trace of that network.

    Args:
        weight: lambda.
        probes: the number of probes averaged, for each example.
        coupling: refuse, own or frozen: what to do where examples meet.
        curvature: hessian or ggn.
        params: a glob pattern of tensors; all of two or more dimensions if not given.
        every: penalise each k-th step, at k times the weight.
        warmup: plain steps before the first penalised one, or a fraction of the training.
        ramp: steps, or a fraction of the training, over which the weight grows.
        limit: the largest ratio of penalty to loss.
        on_nonfinite: raise or skip.
        kappa: the difference engine's relative step, adapted if not given.
        two_sided: a second-order ggn.
    """

    name = "seht-s"

    def __init__(
        self,
        *,
        weight: float = 1e-3,
        probes: int = 1,
        coupling: str = "refuse",
        curvature: str = "hessian",
        params: str | None = None,
        every: int = 1,
        warmup: int | float = 0,
        ramp: int | float = 0,
        limit: float | None = None,
        on_nonfinite: str = "raise",
        kappa: float | None = None,
        two_sided: bool = False,
    ) -> None:
        self.coupling = coupling
        super().__init__(
            weight=weight,
            estimator=Estimator(probes=probes, coupling=coupling),
            curvature=curvature,
            params=params,
            every=every,
            warmup=warmup,
            ramp=ramp,
            limit=limit,
            on_nonfinite=on_nonfinite,
            kappa=kappa,
            two_sided=two_sided,
        )

    def setup(self, run: Run) -> None:
        """Say now that the network does not fit, not at the first penalised step."""
        coupled = any(isinstance(module, _BatchNorm) for module in run.model.modules())
        if coupled and self.coupling == "refuse":
            raise ValueError(
                "seht-s: the examples of a batch meet in BatchNorm; use --model.norm group, or "
                "seht-s(coupling=frozen)"
            )
        super().setup(run)
