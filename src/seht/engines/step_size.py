r"""The step size of the difference engine, and the error that it causes.

A difference with step e has a truncation error :math:`T e^a` and a rounding error
:math:`R / e^b`, and no one step suits all models. Comparing the gradients at e/2, e and 2e gives
two equations for the two sizes, and with them the error at e and the best step (``looks.py``).

A check tries one step after the other until it finds none that is better; the estimate is then made
with the best. Checks come on first use and rarely later. In between, the error of the last checks
is stated only if they agreed: each belongs to one probe, and if probes differ, the error of another
one is not known without a check.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from seht.engines.looks import Look
from seht.errors import warn

START = {
    ("hessian", torch.float64): 1e-4,
    ("hessian", torch.float32): 1e-2,
    ("ggn", torch.float64): 1e-6,
    ("ggn", torch.float32): 3e-3,
    # With precision="native". Measured: a gradient within .05 to .14 of the truth in float16 (as
    # in TF32), .1 to .5 in bfloat16; at the steps of float32 it is off by factors of 1 to 65.
    ("hessian", torch.float16): 0.1,
    ("hessian", torch.bfloat16): 0.1,
    ("ggn", torch.float16): 0.03,
    ("ggn", torch.bfloat16): 0.1,
}
"""The first relative step, by curvature and the type that the passes compute in."""

OF_LOSSES = START | {("hessian", torch.float64): 1e-3}
"""The same where losses are compared (``forward_only.py``): larger, as they round more."""

_GOOD = 2e-3  # below this error the step is left alone
_BAD = 0.1  # above this error the user is warned
_BAD_HALF = 0.6  # ... where passes in half precision were asked for
_GAP = 512  # steps between checks, in the long run
_LOOKS = 6  # at so many steps in one check
_AGREE = 3  # so many checks of different probes must agree before their error is one of all
_FACTOR = 1.5  # ... to within this factor
_HIDDEN = 27.0  # the logarithm of an error that stands for any larger one, infinite ones included
LARGEST = 0.3
"""The relative step never grows beyond this."""


@dataclass
class StepControl:
    """The relative step kappa (e = kappa |w| / |sigma|), adapted to what the checks see."""

    kappa: float | None = None
    fixed: bool = False
    error: float | None = None
    """The error of the last use, relative to the gradient, if it is known."""
    uses: int = 0
    next_check: int = 0
    gap: int = 4
    looks: int = 0
    """Checks that agree on this step so far."""
    level: float = 0.0
    """The mean of the logarithm of their errors."""
    spread: float = 0.0
    """How far apart those logarithms lie; what was long ago counts less."""
    warned: bool = False
    names: int = 0
    """A checksum of the tensors' names that it is the step of; 0 before the first use."""
    eps: float = 0.0
    """The relative rounding of the passes that the step was found for; 0 before the first use."""

    def copy(self, names: Iterable[str]) -> StepControl:
        """For a use of these tensors; the search starts again where the last ones were others."""
        checksum = zlib.crc32(" ".join(names).encode()) or 1
        if self.names in (0, checksum):
            return replace(self, names=checksum)
        kappa = self.kappa if self.fixed else None
        return replace(self, names=checksum, kappa=kappa, next_check=self.uses, gap=4, looks=0)

    def start(self, curvature: str, dtype: torch.dtype) -> float:
        """The step to begin with now, for passes that compute in this type."""
        eps = torch.finfo(dtype).eps
        if self.eps not in (0, eps):  # autocast went on or off
            self.kappa = self.kappa if self.fixed else None
            self.next_check, self.gap, self.looks = self.uses, 4, 0
        self.eps = eps
        if self.kappa is None:
            if (curvature, dtype) not in START:
                raise TypeError(f"engine='difference' needs real floating weights, not {dtype}")
            self.kappa = START[curvature, dtype]
        self.error = self._usual()
        return self.kappa

    def _usual(self) -> float | None:
        """The error of a step that is not checked: known if the last checks agreed."""
        if self.looks < _AGREE or self.spread > math.log(_FACTOR):
            return None
        return math.exp(self.level) if self.level < _HIDDEN else math.inf

    def go_on(self, own: StepControl) -> StepControl:
        """This control, loaded from a state, in place of ``own``; a given step stays."""
        return replace(self, fixed=own.fixed, kappa=own.kappa if own.fixed else self.kappa)

    def begin_at(self, kappa: float) -> None:
        """Begin the search at this step."""
        self.kappa = kappa

    def used(self) -> StepControl:
        """Count one more use."""
        return replace(self, uses=self.uses + 1)

    @property
    def due(self) -> bool:
        """Whether this use should compare steps."""
        return self.uses >= self.next_check

    def search(self, look: Callable[[float], Look], a: float, b: float) -> None:
        """Look at the step, and at others as long as they promise to be better; take the best.

        The error is :math:`T e^a` by truncation and :math:`R / e^b` by rounding.
        """
        assert self.kappa is not None
        before, kappa = self.kappa, self.kappa
        best: tuple[float, float, Look] | None = None
        for _ in range(1 if self.fixed else _LOOKS):
            seen = look(kappa)
            error = seen.error(a, b)
            if error is None:
                break
            if best is None or error <= best[0]:
                best = (error, kappa, seen)
            factor = min(seen.factor(a, b), LARGEST / kappa)
            if error <= _GOOD or 0.7 < factor < 1.4:
                break
            kappa *= factor
        if best is None:
            self.error = None
            self._wait()
            return
        self.error, self.kappa, seen = best
        self._remember(self.error, moved=not 0.7 < self.kappa / before < 1.4)
        bad = _BAD if self.eps < 1e-6 else _BAD_HALF
        if self.error > bad and seen.harm(a, b) > _GOOD and not self.warned:
            self.warned = True
            self._warn(seen.rounded(a, b))

    def _remember(self, error: float, *, moved: bool) -> None:
        x = min(math.log(max(error, 1e-12)), _HIDDEN)
        if moved or not self.looks:
            self.looks, self.level, self.spread, self.gap = 0, x, 0.0, 4
        self.looks += 1
        self.spread = max(0.7 * self.spread, abs(x - self.level))
        self.level += (x - self.level) / min(self.looks, 4)
        if self.looks < _AGREE:
            self.next_check = self.uses + 1  # another probe, at once
        else:
            self._wait()

    def _wait(self) -> None:
        self.gap = min(_GAP, 2 * self.gap)
        self.next_check = self.uses + self.gap

    def _warn(self, rounding: bool) -> None:
        cause, fix = (
            (
                "rounding: the trace is tiny beside the gradient, the precision is low, or a "
                "decision is not frozen, which looks the same",
                "leave precision='full', use float64 weights, probe more of them, raise kappa=, or "
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
            f"seht: the difference engine's gradient is off by some {self.error:.0%} "
            f"(at relative step {self.kappa:.2g}), by {cause}. To mend it: {fix}."
        )

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``state_dict``."""
        return asdict(self)

    @staticmethod
    def of(state: dict[str, Any]) -> StepControl:
        """From what :meth:`state` returned, also in an older version, which had more numbers."""
        known = {f.name for f in fields(StepControl)}
        return StepControl(**{name: value for name, value in state.items() if name in known})
