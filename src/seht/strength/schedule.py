"""When a step is penalised, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from seht.errors import check_count, warn

_RARE = 4
"""With fewer penalised steps than one in four, each that much stronger, the gain was lost."""


@dataclass(frozen=True)
class Schedule:
    """Plain steps first, then every k-th one penalised, with a weight that may grow.

    ``warmup`` and ``ramp`` are whole numbers of steps, or fractions below 1 of ``total_steps``.
    """

    every: int = 1
    warmup: float = 0
    ramp: float = 0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        for name in ("warmup", "ramp"):
            check_length(name, getattr(self, name))
        check_count("total_steps", self.total_steps, optional=True)

    def warn_if_rare(self) -> None:
        """Warn of penalised steps that are too rare, and too strong."""
        if self.every > _RARE:
            warn(
                f"seht: every={self.every} puts {self.every} times the weight on single steps, too "
                f"much of it for the loss to mend in between; take every={_RARE} or less"
            )

    def warn_if_unused(self, step: int) -> None:
        """Warn of a training that ended within the warm-up."""
        if 0 < step <= self.plain_steps:
            warn(
                f"seht: the training ended at step {step}, within the warm-up of "
                f"{self.plain_steps} steps: the penalty did nothing. Give warmup= as a fraction of "
                "the training, as in warmup=0.1 with total_steps=, or fewer steps."
            )

    def weight(self, base: float, step: int) -> float:
        """The weight of a step, 0 on a plain one.

        Penalised are the steps with ``step >= warmup`` and ``(step - warmup) % every == 0``, at
        ``every`` times the weight, which grows over the first ``ramp`` steps after the warm-up.
        """
        since, ramp = step - self.plain_steps, self._steps("ramp")
        if since < 0 or since % self.every:
            return 0.0
        grown = min(1.0, (since + 1) / ramp) if ramp else 1.0
        return base * grown * self.every

    def grown(self, step: int) -> bool:
        """Whether the ramp is over."""
        return step + 1 >= self.plain_steps + self._steps("ramp")

    def due(self, step: int) -> bool:
        """Whether a step is one of the penalised."""
        return self.weight(1.0, step) > 0

    def number(self, step: int) -> int:
        """How many penalised steps come before this one."""
        return (step - self.plain_steps) // self.every

    @property
    def penalised(self) -> int | None:
        """How many penalised steps the training has, where its length is known."""
        if self.total_steps is None:
            return None
        return max(0, self.total_steps - self.plain_steps) // self.every

    @property
    def plain_steps(self) -> int:
        """How many steps the warm-up has."""
        return self._steps("warmup")

    def _steps(self, name: str) -> int:
        length = getattr(self, name)
        if not 0 < length < 1:
            return int(length)
        if self.total_steps is None:
            raise ValueError(
                f"{name}={length:g} is a fraction of the training, whose length is not known; pass "
                f"total_steps=, the number of its optimiser steps, or {name}= as a number of steps"
            )
        return round(length * self.total_steps)


def check_weight(weight: Any) -> float:
    """A number that can be a weight."""
    if isinstance(weight, Tensor):
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(
            f"weight must be a number, a function of the step, a path or 'tuned', not {weight!r}"
        )
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight must be finite and not negative, not {weight!r}")
    return float(weight)


def check_length(name: str, value: Any) -> None:
    """A whole number of steps, or a fraction of the training."""
    if not isinstance(value, float):
        check_count(name, value, 0)
    elif not 0 < value < 1:
        raise ValueError(
            f"{name} must be a whole number of steps, or a fraction between 0 and 1 of "
            f"total_steps, not {value!r}"
        )
