r"""The step size of the difference engine, and the error that it causes.

A difference with step e has a truncation error :math:`T e^a` and a rounding error
:math:`R / e^b`, and no one step suits all models. Comparing the gradients at e/2, e and 2e gives
two equations for the two sizes, and with them the error at e and the best step (``looks.py``).

A check tries one step after the other until it finds none that is better; the estimate is then made
with the best. Checks come on first use and rarely later. In between, the error of the last checks
is stated only if they agreed: each belongs to one probe, and if probes differ, the error of another
one is not known without a check.

Each set of tensors that SEHT-D draws has a control of its own: a check of one set says little about
another. An embedding of unit size beside weights of .02 has another best step, and another error. A
set that nobody has looked at gets the step that suits the most delicate of its tensors, and states
no error.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from seht.engines.looks import Look, compared
from seht.errors import warn
from seht.replay.passes import Passes
from seht.task import Directions, Task

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

_SETS = 256  # so many are remembered, the last ones
_FREE = 8  # checks before they are rationed
_RATION = 64  # one check in so many uses after that: each costs several plain steps


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


Names = tuple[str, ...]


@dataclass(frozen=True)
class DrawSteps:
    """The controls by set, and how far each tensor was moved when the step was a good one."""

    controls: dict[Names, StepControl] = field(default_factory=dict)
    reach: dict[str, float] = field(default_factory=dict)
    """By name of a tensor: the largest of its relative steps e |sigma| / |w| that suited."""
    uses: int = 0
    checks: int = 0

    def control(self, names: Names, main: StepControl) -> StepControl:
        """A copy of the set's own."""
        known = self.controls.get(names)
        if known is None:
            kappa = main.kappa if main.fixed else None
            return StepControl(kappa=kappa, fixed=main.fixed, warned=main.warned)
        return replace(known, warned=main.warned)

    def known(self, names: Names) -> bool:
        """Whether the set was checked before."""
        control = self.controls.get(names)
        return control is not None and control.looks > 0

    def learnt(self, names: Names, control: StepControl, moved: dict[str, float]) -> DrawSteps:
        """The same after a use; after a check ``moved`` has the relative step of each tensor. For
        a set that was never checked there is nothing to keep.
        """
        if not (self.known(names) or moved or control.fixed):
            return replace(self, uses=self.uses + 1)
        others = {known: c for known, c in self.controls.items() if known != names}
        controls = dict([*others.items(), (names, control)][-_SETS:])
        reach = self.reach | {n: max(size, self.reach.get(n, 0.0)) for n, size in moved.items()}
        return DrawSteps(controls, reach, self.uses + 1, self.checks + bool(moved))

    @property
    def pause(self) -> int:
        """Uses until the next check: one at first, many later."""
        return 1 if self.checks < _FREE + self.uses / _RATION else _RATION

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``state_dict``."""
        sets = [[list(names), control.state()] for names, control in self.controls.items()]
        reach = [list(pair) for pair in self.reach.items()]
        return {"sets": sets, "reach": reach, "uses": self.uses, "checks": self.checks}

    @staticmethod
    def of(state: dict[str, Any]) -> DrawSteps:
        """From what :meth:`state` returned."""
        controls = {tuple(names): StepControl.of(control) for names, control in state["sets"]}
        reach = {name: float(size) for name, size in state["reach"]}
        return DrawSteps(controls, reach, state["uses"], state["checks"])


class StepPlan:
    """The step of one estimate. The engine keeps what it learns if the step succeeds (`learn`)."""

    def __init__(self, task: Task, main: StepControl, draws: DrawSteps, *, check: bool) -> None:
        self._names, self._draws = tuple(task.weights), draws
        self._whole = len(task.weights) == task.count
        self._main = main if self._whole else replace(main)
        self._control = main.copy(self._names) if self._whole else draws.control(self._names, main)
        self.check = check and self._control.due and (self._whole or main.due)
        """Whether steps are compared."""
        self._moved: dict[str, float] = {}
        self._reach: dict[str, float] = {}
        """If this set of tensors was never checked: what is known of each of them."""
        if not (self._whole or main.fixed or draws.known(self._names)):
            self._reach = {n: draws.reach[n] for n in self._names if n in draws.reach}
        self._kappa = 0.0

    def start(self, curvature: str, dtype: torch.dtype) -> None:
        """Set the step for passes that compute in this dtype."""
        self._kappa = self._control.start(curvature, dtype)
        if not self._whole:
            self._main.start(curvature, dtype)

    def length(self, passes: Passes, sigma: Directions) -> Tensor:
        """The step e along a probe."""
        e = passes.weights.step(sigma, self._kappa)
        if not self._reach:
            return e
        most = passes.weights.step(sigma, LARGEST)
        within = passes.weights.within(sigma, self._reach).to(e.dtype)
        return torch.where(within.isfinite(), torch.minimum(within, most), e)

    def search(
        self,
        passes: Passes,
        sigma: Directions,
        gradient: Callable[[Tensor], Tensor],
        slope: Callable[[], Tensor],
        a: float,
        b: float,
        *,
        noise: float = 0.0,
        common: float = 0.0,
    ) -> None:
        """Compare steps along a probe, and go on with the best.

        ``gradient`` takes that of the trace with a step e, ``slope`` that of the loss, of which
        ``noise`` / e^2 is the rounding to expect; both are sketches (``gradients.py``). Truncation
        grows like e^a, rounding like e^-b, of which ``common`` is the centre's.
        """
        unit = passes.weights.step(sigma, 1.0)
        if self._reach:  # a better place to begin at
            self._control.begin_at(float(self.length(passes, sigma) / unit))

        def look(kappa: float) -> Look:
            e = kappa * unit
            found = [gradient(factor * e) for factor in (0.5, 1.0, 2.0)]
            *sizes, whole = passes.leaves.sizes(*compared(found, a), slope())
            sizes += [passes.task.weight * sizes[2] / whole, noise * whole / e**2]
            seen = torch.stack([v.double() for v in sizes]).tolist()
            return replace(Look(*seen), grain=self._control.eps * seen[-1], common=common)

        self._control.search(look, a, b)
        self._kappa = self._control.kappa or self._kappa
        self._reach = {}
        if not self._whole:
            sizes, parts = passes.weights.lengths(sigma)
            relative = (self._kappa * unit * parts / sizes).tolist()
            pairs = zip(passes.used, relative, strict=True)
            self._moved = {n: r for n, r in pairs if 0 < r < 1e9}

    def learn(self) -> tuple[StepControl, DrawSteps, float | None]:
        """The engine's controls after this use, and the error of this use."""
        control = self._control.used()
        error = control.error
        if self._whole:
            return control, self._draws, error
        draws = self._draws.learnt(self._names, control, self._moved)
        main = replace(self._main.used(), error=error, warned=control.warned)
        if self._moved:
            later = main.uses + draws.pause - 1
            main = replace(main, kappa=control.kappa, next_check=later)
        return main, draws, error
