"""The values that a weight had over a training, for another training to repeat."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = "seht.WeightPath/1"


@dataclass(frozen=True)
class WeightPath:
    """The weight λ as a function of the fraction of a training, as ``weight="tuned"`` found it.

    Give it as ``weight=`` to repeat these weights, for example on all the data including the
    held-out examples. Between its points log λ is interpolated linearly; before the first and after
    the last λ is constant. ``every`` multiplies it afterwards. It costs nothing.

    Example:
        ```python
        path = seht.WeightPath((0.1, 0.9), (1e-3, 4e-3))  # or penalty.path, after a tuned training
        penalty = seht.HessianTrace(model, weight=path, total_steps=100)
        ```

    ``json.dumps(path.state())`` saves it, and :meth:`of` makes it from such a state.
    """

    positions: tuple[float, ...]
    """Fractions of the training, in increasing order."""
    weights: tuple[float, ...]
    """λ at these positions."""
    curvature: str | None = field(default=None, compare=False)
    """The curvature of the training that found it, also used where the path is repeated, unless
    ``curvature=`` says otherwise."""

    def __post_init__(self) -> None:
        if not self.positions or len(self.positions) != len(self.weights):
            raise ValueError("a path needs as many weights as positions, and at least one of each")
        if not all(0 <= p <= 1 for p in self.positions):  # a nan is not, either
            raise ValueError(
                "the positions of a path are fractions of the training, from 0 to 1; divide steps "
                "by their number"
            )
        if any(a >= b for a, b in zip(self.positions, self.positions[1:], strict=False)):
            raise ValueError("the positions of a path must grow from one to the next")
        if not all(math.isfinite(w) and w > 0 for w in self.weights):
            raise ValueError("the weights of a path must be positive and finite")

    def at(self, position: float) -> float:
        """The weight at a fraction of the training."""
        right = bisect.bisect_right(self.positions, position)
        if right == 0:
            return self.weights[0]
        if right == len(self.positions):
            return self.weights[-1]
        a, b = self.positions[right - 1 : right + 1]
        part = (position - a) / (b - a)
        low, high = self.weights[right - 1 : right + 1]
        return low * (high / low) ** part

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``state_dict``, records and JSON."""
        named = {} if self.curvature is None else {"curvature": self.curvature}
        return {
            "format": FORMAT,
            "positions": list(self.positions),
            "weights": list(self.weights),
            **named,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> WeightPath:
        """The path that :meth:`state` wrote down."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"this is no path of weights ({found!r} in place of {FORMAT!r}); pass penalty.path "
                "of a training with weight='tuned', or what its state() wrote down"
            )
        try:
            positions, weights = (
                tuple(float(x) for x in state[name]) for name in ("positions", "weights")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this path of weights is not complete, or has something else than numbers "
                f"({error}); pass penalty.path, or what its state() wrote down"
            ) from error
        return cls(positions, weights, state.get("curvature"))

    def __repr__(self) -> str:
        """Where it begins, how far it goes, where it ends."""
        low, high = min(self.weights), max(self.weights)
        return (
            f"WeightPath({len(self.weights)} points, from {self.weights[0]:.3g} to "
            f"{self.weights[-1]:.3g}, within {low:.3g} and {high:.3g})"
        )
