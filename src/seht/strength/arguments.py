"""The weight and the curvature, from the arguments ``weight=``, ``share=`` and ``follow=``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seht.errors import warn
from seht.strength.share_weight import SHARE, ShareWeight
from seht.strength.tuned_weight import TunedWeight
from seht.strength.tuning import Tuning
from seht.strength.weight import PathWeight, Weight, WeightPath


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


_FAINT, _ALL = 0.05, 5.0
"""With wrong labels a share of 0.03 gained nothing and 0.1 a point, where 4 gained 7; 8 lost 10,
and at 16 little was learnt (docs/which-weight.md)."""


def _warn_of_share(name: str, share: float) -> None:
    if share < _FAINT:
        warn(
            f"seht: {name}={share:g} of the loss's gradient is too little to do anything; take "
            f"{name}=4, or 1 if the labels are right"
        )
    if share > _ALL:
        warn(
            f"seht: at {name}={share:g} the penalty is all there is: in trials 8 lost more than it "
            f"gained; take {name}=4 or less"
        )


def filled_in(weight: Any, curvature: str | None) -> tuple[Any, str]:
    """The weight and the curvature, with the default of the latter filled in."""
    weight = WeightPath.of(weight) if isinstance(weight, Mapping) else weight
    if curvature is None and isinstance(weight, WeightPath):
        curvature = weight.curvature  # another trace would have another weight
    if curvature is None and (weight is None or isinstance(weight, (str, Tuning))):
        curvature = "ggn"  # what every trial of shares and of the rule was made with
    return weight, "hessian" if curvature is None else curvature


def make_weight(weight: Any, share: float | None, follow: bool, curvature: str) -> Weight:
    """The weight object for the user's arguments."""
    if weight is None and share is None and curvature == "ggn":
        return ShareWeight(SHARE, follow=True) if follow else OpenWeight()
    if share is not None:
        if weight is not None:
            raise ValueError("give weight= or share=, not both: a share is how a weight is found")
        way = ShareWeight(share, follow=follow)
        _warn_of_share("share", share)
        return way
    if follow:
        raise ValueError("follow=True keeps measuring a share; give it with share=")
    if weight is None:
        raise TypeError(
            "the Hessian's trace needs a weight: weight=1e-3, weight='tuned' (with held_out= in "
            "the call) or share=3.0 in its place; or leave curvature= out"
        )
    if isinstance(weight, WeightPath):
        return PathWeight(weight)
    if isinstance(weight, str):
        if weight != "tuned":
            raise ValueError(f"weight must be a number, a path or 'tuned', not {weight!r}")
        weight = Tuning()
    if not isinstance(weight, Tuning):
        return Weight(weight)
    _warn_of_share("most", weight.most)
    return TunedWeight(weight)
