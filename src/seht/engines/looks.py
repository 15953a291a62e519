r"""The error of a step e, computed from the gradients at e/2, e and 2e."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

_COARSE = 100  # what looks like rounding, but is so many times what to expect, is something else
_DOUBTFUL = 0.2  # above this error the gradient's own length is not taken for granted


def compared(gradients: list[Tensor], a: float) -> list[Tensor]:
    """The vectors whose lengths make up a :class:`Look`."""
    half, one, two = gradients
    d, width = half - one, 2.0**a
    return [d, one - two, one, half + one, one + two, (width * half - one) / (width - 1), d * d]


@dataclass(frozen=True)
class Look:
    """Lengths of the gradients at e/2, e and 2e, and of their sums and differences."""

    small: float
    """Of the difference between e/2 and e."""
    large: float
    """Of that between e and 2e."""
    size: float
    """Of the gradient at e."""
    sum_small: float
    sum_large: float
    extrapolated: float
    """Of what e/2 and e promise for a step of 0."""
    squares: float
    """Of the squared entries of the first difference."""
    share: float
    """The penalty's gradient over the loss's: where the one is nothing beside the other (a
    quadratic loss: the trace does not change at all), its error is no news.
    """
    grain: float = 0.0
    """The rounding to expect at best; 0 if unknown."""
    common: float = 0.0
    """How much of the rounding's square is the centre's, and the same at all three steps."""

    def parts(self, a: float, b: float) -> tuple[float, float]:
        """The squares of truncation u = (T e^a)^2 and rounding r = (R / e^b)^2.

        The squared distances are ``(1 - 2^-a)^2 u + (4^b + 1) r`` and
        ``(2^a - 1)^2 u + (1 + 4^-b) r``, with 2^(1+b) and 2^(1-b) less of the common part of r.
        """
        m11, m12 = (1 - 2.0**-a) ** 2, 4.0**b + 1 - self.common * 2 ** (1 + b)
        m21, m22 = (2.0**a - 1) ** 2, 1 + 4.0**-b - self.common * 2 ** (1 - b)
        d1, d2 = self.small**2, self.large**2
        det = m11 * m22 - m12 * m21
        return max(0.0, (d1 * m22 - m12 * d2) / det), max(0.0, (m11 * d2 - m21 * d1) / det)

    def rounded(self, a: float, b: float) -> bool:
        """Whether the error is mostly rounding. If it is far more than rounding can be, it is not:
        then the loss bends so sharply that the gradients at e/2, e and 2e have nothing in common.
        """
        truncation, rounding = self.parts(a, b)
        return rounding > truncation and not self._erratic(rounding)

    def _erratic(self, rounding: float) -> bool:
        return self.grain > 0 and rounding > (_COARSE * self.grain) ** 2

    def error(self, a: float, b: float) -> float | None:
        """The error at e, relative to the right gradient; infinite if noise hides that gradient,
        None if the gradient is 0 or not finite.
        """
        if not self.finite or self.size == 0:
            return None
        whole = sum(self.parts(a, b))
        if whole <= (_DOUBTFUL * self.size) ** 2:
            return math.sqrt(whole) / self.size
        right = self._right(a, b)
        return math.sqrt(whole / right) if right > 0 else math.inf

    def harm(self, a: float, b: float) -> float:
        """The error relative to the gradient of the loss, to which the penalty's is added."""
        return math.sqrt(sum(self.parts(a, b))) / self.size * self.share

    def factor(self, a: float, b: float) -> float:
        """The factor to change the step by; a single look may change it by at most 4 times."""
        truncation, rounding = self.parts(a, b)
        if self._erratic(rounding):
            return 0.25
        best = 4.0
        if truncation > 0:
            best = (b * rounding / (a * truncation)) ** (1 / (2 * a + 2 * b))
        if rounding > 4 * truncation:
            best = max(best, 2.0)  # noise passes for truncation, and would hold the step back
        return min(4.0, max(0.25, best))

    def _right(self, a: float, b: float) -> float:
        """The squared length of the right gradient g, without the noise that the measured one
        contains; 0 if it is lost in the noise.

        With rounding: different steps have independent noise, except for the centre's part n, which
        grows like e^-b. The inner products of the gradients at (e/2, e) and (e, 2e) are then
        g.g + 2^b n.n and g.g + 2^-b n.n, from which g.g follows, up to the scatter of the entries.
        With truncation: the gradient extrapolated to a step of 0, less the rounding in it.
        """
        truncation, rounding = self.parts(a, b)
        if rounding < truncation:
            width = 2.0**a
            noise = (width**2 * 4.0**b + 1) * rounding / (width - 1) ** 2
            return max(self.extrapolated**2 - noise, 0.0)
        near = (self.sum_small**2 - self.small**2) / 4
        far = (self.sum_large**2 - self.large**2) / 4
        common = max(0.0, (near - far) / (2.0**b - 2.0**-b))
        right = far - common * 2.0**-b
        doubt = rounding / math.sqrt(self._entries) + 2.0**a * truncation
        return right if right > doubt else 0.0

    @property
    def _entries(self) -> float:
        """How many independent numbers the first difference has, a few large ones counting most."""
        return max(1.0, self.small**4 / self.squares**2) if self.squares > 0 else 1.0

    @cached_property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        values = (self.small, self.large, self.size, self.sum_small, self.sum_large)
        return all(map(math.isfinite, (*values, self.extrapolated, self.squares)))
