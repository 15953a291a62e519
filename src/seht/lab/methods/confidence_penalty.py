"""Confidence penalty."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from seht.lab.methods.base import Forward, Method, not_negative


class ConfidencePenalty(Method):
    r"""Uncertainty is rewarded: the entropy of the predictions is taken from the loss.

    Cross-entropy **minus** :math:`\beta\,\mathrm{mean}_i H(p_i)`.

    Pereyra et al., arXiv 1701.06548.

    Args:
        weight: beta (0.001 on CIFAR-10, 0.1 on CIFAR-100 in the paper).
    """

    name = "confidence-penalty"

    def __init__(self, *, weight: float = 0.1) -> None:
        self.weight = not_negative("weight", weight)

    def term(self, forward: Forward) -> Tensor:
        return -self.weight * entropy(forward.logits).mean()


def entropy(logits: Tensor) -> Tensor:
    r""":math:`-\sum_k p_k \log p_k` of each example."""
    logp = F.log_softmax(logits, dim=1)
    return -(logp.exp() * logp).sum(1)
