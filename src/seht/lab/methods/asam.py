"""Adaptive sharpness-aware minimisation."""

from __future__ import annotations

from seht.lab.methods.sam import Sam


class Asam(Sam):
    r"""SAM in a ball measured relative to each weight.

    .. math:: w + \rho\, \frac{w^2 g}{\lVert\, |w|\, g\, \rVert}

    (products entry by entry) in place of SAM's :math:`w + \rho\, g / \lVert g \rVert`: the same for
    a layer and for that layer scaled up with the next one scaled down. Kwon et al., arXiv
    2102.11600, whose rho for CIFAR-10 is the default; without their eta, so that weights at 0 stay.

    Args:
        rho: the radius.
    """

    name = "asam"
    excludes = frozenset({"sam"})

    def __init__(self, *, rho: float = 0.5) -> None:
        super().__init__(rho=rho, adaptive=True)
