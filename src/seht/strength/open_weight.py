"""The weight where nothing was said of it: the study's share, or tuned once held-out data come."""

from __future__ import annotations

from seht.strength.share_weight import SHARE, ShareWeight
from seht.strength.tuned_weight import TunedWeight
from seht.strength.tuning import Tuning
from seht.strength.weight import Weight


class OpenWeight(ShareWeight):
    """A share of 2, unless held-out data are given before it is measured, by whoever has them."""

    def __init__(self) -> None:
        super().__init__(SHARE)

    def with_held_out(self) -> Weight:
        """A tuned one; later than the first penalised step would be neither of the two."""
        if self._count:
            raise ValueError(
                "held_out= came after the first penalised step, which went by the default share; "
                "give it from the first call on, or when the penalty is made"
            )
        return TunedWeight(Tuning())
