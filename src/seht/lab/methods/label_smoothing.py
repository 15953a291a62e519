"""Label smoothing."""

from __future__ import annotations

from seht.lab.methods.base import Method, not_negative, share


class LabelSmoothing(Method):
    r"""Targets that leave every class a little probability.

    Cross-entropy with targets :math:`(1 - \epsilon)\,\mathrm{onehot} + \epsilon / K`.

    Szegedy et al., arXiv 1512.00567. The paper adds :math:`\lambda U`, U the mean of
    :math:`-\log p_k` over the classes, to the cross-entropy, which is :math:`1 + \lambda` times
    label smoothing with :math:`\epsilon = \lambda / (1 + \lambda)`; that factor, a learning rate,
    is left out.

    Args:
        weight: the paper's lambda (0.01 on CIFAR-10, 0.1 on CIFAR-100).
        eps: epsilon itself, in place of ``weight``.
    """

    name = "label-smoothing"

    def __init__(self, *, weight: float = 0.1, eps: float | None = None) -> None:
        weight = not_negative("weight", weight)
        self.smoothing = weight / (1 + weight) if eps is None else share("eps", eps, one=False)
