r"""The step of the difference engine: how large, and how good its answer is.

A difference with step e has a truncation error :math:`T e^a` and a rounding error
:math:`R / e^b`, and no one step suits all models. Comparing the gradients at e/2, e and 2e gives
two equations for the two sizes, and with them the error at e and the best step. That is done on
first use and every so often; in between the last answer holds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from seht.guards import warn

START = {
    ("hessian", torch.float64): 1e-4,
    ("hessian", torch.float32): 1e-2,
    ("ggn", torch.float64): 1e-6,
    ("ggn", torch.float32): 3e-3,
}
"""The first relative step, by curvature and dtype of the weights."""

_GOOD = 2e-3  # below this error the step is left alone
_BAD = 0.1  # above this one the user hears of it
_GAP = 512  # steps between checks, in the long run
_MOVES = 4  # quick looks at a step that was just changed
_LARGEST = 0.3  # the relative step never grows beyond this


@dataclass
class StepControl:
    """The relative step kappa (e = kappa |w| / |sigma|), adapted to what the checks see."""

    kappa: float | None = None
    fixed: bool = False
    error: float | None = None
    """Of the last use, relative to the gradient."""
    ahead: float | None = None
    """What to expect of the next one, at the step that the last check chose."""
    uses: int = 0
    next_check: int = 0
    gap: int = 8
    moves: int = 0
    warned: bool = False
    kind: str | None = None
    """What the step was adapted to: the curvature, and the dtype of the weights."""

    def start(self, curvature: str, dtype: torch.dtype) -> float:
        """The step to use now; the first one again where the model was cast to another dtype."""
        kind = f"{curvature} {dtype}"
        if self.kind not in (None, kind) and not self.fixed:
            self.kappa = self.error = self.ahead = None
            self.next_check, self.gap, self.moves = self.uses, 8, 0
        self.kind = kind
        if self.kappa is None:
            if (curvature, dtype) not in START:
                raise TypeError(
                    f"engine='difference' needs float32 or float64 weights, not {dtype}; keep the "
                    "weights in float32 (mixed precision casts them where it pays)"
                )
            self.kappa = START[curvature, dtype]
        if self.ahead is not None:
            self.error = self.ahead
        return self.kappa

    @property
    def due(self) -> bool:
        """Whether this use should compare steps."""
        return self.uses >= self.next_check

    def learn(
        self, small: float, large: float, size: float, a: float, b: float, share: float = math.inf
    ) -> None:
        """Take in a check: the distances of the gradients at (e/2, e) and (e, 2e), and their size.

        ``share`` is the penalty's gradient over the loss's: where the one is nothing beside the
        other (a quadratic loss: the trace does not change at all), its error is no news.

        With u = (T e^a)^2 and r = (R / e^b)^2 the squared distances are
        ``(1 - 2^-a)^2 u + (4^b + 1) r`` and ``(2^a - 1)^2 u + (1 + 4^-b) r``.
        """
        if not all(map(math.isfinite, (small, large, size))) or size == 0:
            self._wait()
            return
        m11, m12 = (1 - 2.0**-a) ** 2, 4.0**b + 1
        m21, m22 = (2.0**a - 1) ** 2, 1 + 4.0**-b
        d1, d2 = (small / size) ** 2, (large / size) ** 2
        det = m11 * m22 - m12 * m21
        truncation = max(0.0, (d1 * m22 - m12 * d2) / det)
        rounding = max(0.0, (m11 * d2 - m21 * d1) / det)
        self.error = self.ahead = math.sqrt(truncation + rounding)
        changed = False
        if self.error > _GOOD and not self.fixed and self.kappa is not None:
            best = (
                (b * rounding / (a * truncation)) ** (1 / (2 * a + 2 * b))
                if truncation > 0
                else 4.0
            )
            if rounding > 4 * truncation:
                best = max(best, 2.0)  # noise passes for truncation, and would hold the step back
            factor = min(4.0, max(0.25, best), _LARGEST / self.kappa)
            changed = not 0.7 < factor < 1.4
            self.kappa *= factor
            truncation *= factor ** (2 * a)
            rounding /= factor ** (2 * b)
            self.ahead = math.sqrt(truncation + rounding)
        if changed and self.moves < _MOVES:
            self.gap, self.moves = 1, self.moves + 1  # look at the new step at once
            self.next_check = self.uses + 1
        else:
            self._wait()
        if self.ahead > _BAD and self.gap > 1 and self.ahead * share > _GOOD and not self.warned:
            self.warned = True
            self._warn(rounding > truncation)

    def _wait(self) -> None:
        self.gap = min(_GAP, max(8, 2 * self.gap))
        self.next_check = self.uses + self.gap

    def _warn(self, rounding: bool) -> None:
        cause, fix = (
            (
                "rounding: the trace is tiny beside the gradient, the precision is low, or a "
                "decision is not frozen, which looks the same",
                "run in float32 or float64 with autocast off, probe more weights, raise kappa=, or "
                "run seht.check on the model and teach its kinks with seht.register_kink",
            )
            if rounding
            else (
                "truncation: the loss bends sharply within one step, or a decision is not frozen",
                "lower kappa=, run seht.check on the model, or teach its kinks with "
                "seht.register_kink",
            )
        )
        warn(
            f"seht: the difference engine's gradient is off by some {self.ahead:.0%} "
            f"(at relative step {self.kappa:.2g}), by {cause}. To mend it: {fix}."
        )

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``state_dict``."""
        return asdict(self)
