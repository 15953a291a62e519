"""Lookahead."""

from __future__ import annotations

from torch.optim import Optimizer

from seht.lab.methods.base import Method, at_least, share


class Lookahead(Method):
    r"""Slow weights that follow the fast ones every k steps.

    Every k steps :math:`slow \leftarrow slow + \alpha (fast - slow)`, then fast = slow.

    Zhang et al., arXiv 1907.08610; the optimiser is pytorch_optimizer's.

    Args:
        k: fast steps to a slow one.
        alpha: the slow step.
    """

    name = "lookahead"

    def __init__(self, *, k: int = 5, alpha: float = 0.8) -> None:
        self.k, self.alpha = at_least("k", k, 1), share("alpha", alpha, one=True)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        from pytorch_optimizer import Lookahead as Wrapper  # takes seconds to import

        wrapped: Optimizer = Wrapper(optimizer, k=self.k, alpha=self.alpha)
        return wrapped
