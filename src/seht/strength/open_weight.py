"""The default weight: the study's share, or a tuned weight if held-out data are given in time."""

from __future__ import annotations

from seht.strength.share_weight import SHARE, ShareWeight
from seht.strength.tuned_weight import TunedWeight
from seht.strength.tuning import Tuning
from seht.strength.weight import Weight


class OpenWeight(ShareWeight):
    """A share of 2, unless held-out data are given before the first penalised step."""

    def __init__(self) -> None:
        super().__init__(SHARE)

    def with_held_out(self) -> Weight:
        """The tuned weight that takes its place; refused once the share is being measured."""
        if self._count:
            raise ValueError(
                "held_out= came after the first penalised step, which went by the default share; "
                "give it from the first call on, or when the penalty is made"
            )
        return TunedWeight(Tuning())
