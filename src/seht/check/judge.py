"""One engine compared with the numerical truth: the verdict, and the module to blame."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from seht.check.blame import ModuleCall, blame
from seht.check.report import EngineReport
from seht.check.sandbox import Sandbox
from seht.check.truth import Inconclusive, Truth, asymmetry, measure
from seht.engines import Engine, make_engine
from seht.errors import one_line
from seht.probes import mix

_MORE = 3
"""How many more probes to take if only one of them disagrees."""
_STEPS = 6
"""How many steps an engine may adapt in the model's own precision before it is compared."""
_IMPRECISE = 0.5
"""The largest error in the model's own precision at which the gradient is still useful."""


class Truths:
    """The truth along one random probe after the other, measured when asked for and kept.

    Every second one belongs to a copy at weights a little aside (:meth:`Sandbox.nearby`).
    """

    def __init__(self, box: Sandbox, seed: int, need: float, end: float = math.inf) -> None:
        self._boxes = (box, box.nearby())
        self._end = end
        self._seed, self.need = seed, need
        self._found: list[tuple[Sandbox, Truth]] = []
        self._tried = 0
        self.reason = ""
        """Why the last failed probe failed."""

    def over(self) -> bool:
        """Whether the time (of ``time.perf_counter``) is over; one probe is always tried."""
        return self._tried > 0 and time.perf_counter() > self._end

    def take(self, count: int) -> list[tuple[Sandbox, Truth]]:
        """``count`` of them, or fewer if half of the probes fail or the time is over."""
        while len(self._found) < count and self._tried < 2 * count and not self.over():
            box = self._boxes[self._tried % 2]
            seed = mix(self._seed, self._tried)
            self._tried += 1
            try:
                self._found.append((box, measure(box, seed, self.need)))
            except Inconclusive as error:
                self.reason = str(error)
            except Exception as error:  # no engine is to blame for a loss that fails
                self.reason = f"the loss cannot be computed at other weights: {one_line(error)}"
        return self._found[:count]


@dataclass(frozen=True)
class Answer:
    """How far an engine's answer is from the truth, relatively."""

    value: float
    gradient: float

    @property
    def error(self) -> float:
        """The larger of the two."""
        return max(self.value, self.gradient)


class Adapting:
    """An engine as in a training: one for each copy of the model, adapting its step with use."""

    def __init__(self, name: str, need: float) -> None:
        self.name, self._need = name, need
        self._engines: dict[int, Engine] = {}

    def engine(self, box: Sandbox) -> Engine:
        """The one for this copy."""
        return self._engines.setdefault(id(box), make_engine(self.name))

    def step(self, box: Sandbox, seed: int) -> tuple[Any, list[Any]]:
        """One training step: the estimate, and the gradient of loss + trace in one backward."""
        engine = self.engine(box)
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says it
            estimate = engine.estimate(replace(box.task(seed), weight=1.0), watch=True)
            total = estimate.loss + estimate.trace
            parts = torch.autograd.grad(total, list(box.leaves.values()), allow_unused=True)
            if estimate.learn is not None:
                estimate.learn()
        return estimate, list(parts)

    def ask(self, box: Sandbox, truth: Truth) -> Answer:
        """The engine's error on the truth's task, with the loss's own gradient subtracted.

        The gradient is compared as a whole and, if the truth is accurate enough, tensor by tensor:
        a module near the input may be wrong and yet add little to the whole.
        """
        estimate, parts = self.step(box, truth.seed)
        gradient = {
            n: -truth.base[n] if part is None else part.detach().to_dense().double() - truth.base[n]
            for n, part in zip(box.leaves, parts, strict=True)
        }
        flat = torch.cat([part.flatten() for part in gradient.values()])
        known = truth.parts.items() if box.wide else ()  # of small parts rounding is known
        sharp = [m.error(gradient[n].flatten()) for n, m in known if m.noise < self._need]
        loss = abs(estimate.loss.item() - truth.loss) / max(abs(truth.loss), 1e-12)
        value = truth.trace.error(estimate.trace.detach().double().cpu())
        return Answer(max(value, loss), max(truth.whole.error(flat), *sharp, 0.0))


def judge(
    box: Sandbox,
    name: str,
    truths: Truths,
    directions: int,
    tolerance: float,
    own: Sandbox | None = None,
) -> EngineReport:
    """Compare along ``directions`` probes, and along some more if a single one disagrees.

    ``own`` is a copy in the model's own precision, if that is less than float64.
    """
    answers: list[Answer] = []
    bad: list[int] = []
    engine = Adapting(name, truths.need)
    try:
        for count in (directions, directions + _MORE):
            known = truths.take(count)
            answers += [engine.ask(*pair) for pair in known[len(answers) :]]
            bad = [k for k, answer in enumerate(answers) if not answer.error <= tolerance]
            if len(bad) != 1:
                break
        if not answers:
            engine.step(box, 0)  # whether it runs at all can still be seen
            return EngineReport(name, "inconclusive", reason=truths.reason)
    except Exception as error:
        kind = type(error)
        culprit = blame(box, lambda alone: _fails(alone, name, kind), truths.over)
        return _named(EngineReport(name, "failed", reason=one_line(error)), culprit)
    found = EngineReport(name, "trusted", max(a.error for a in answers), len(answers))
    if not bad:
        return found if own is None else _in_own_precision(found, box, own, known, truths.need)
    if len(bad) == 1:  # two steps agreed on a wrong truth by accident, or it is rarely wrong
        reason = f"one direction of {len(answers)} disagrees with the truth, the others agree"
        if truths.over():
            reason += "; there was no time for more of them: raise budget="
        return replace(found, verdict="inconclusive", reason=reason)
    where, truth = known[bad[0]]
    skew = asymmetry(where, truth, mix(truth.seed))
    if skew > tolerance:
        reason = (
            f"the ordinary gradient belongs to no loss (its Jacobian is asymmetric by {skew:.1g}), "
            "as behind gradient reversal or another custom backward; there is no Hessian then"
        )
        return replace(found, verdict="inconclusive", reason=reason)
    over = truths.over
    culprit = blame(where, lambda alone: _is_wrong(alone, name, truths.need, tolerance), over)
    if max(answers[k].value for k in bad) > tolerance:
        reason = "already the trace itself is off: a second derivative is wrong"
    else:
        reason = "the trace itself is right: a third derivative is wrong"
    if culprit is None and over():
        reason += "; there was no time to find the module that is to blame: raise budget="
    elif culprit is None:
        reason += "; no single module is to blame: look between modules, or at the engine itself"
    return _named(replace(found, verdict="wrong", reason=reason), culprit)


def _in_own_precision(
    found: EngineReport,
    box: Sandbox,
    own: Sandbox,
    known: list[tuple[Sandbox, Truth]],
    need: float,
) -> EngineReport:
    """The same at the user's weights in the user's precision, after some adapting steps."""
    engine = Adapting(found.engine, need)
    truths = [truth for where, truth in known if where is box]
    try:
        kappas: list[float] = []
        for k in range(_STEPS):
            engine.step(own, mix(own.seed, k, 7))
            if (kappa := engine.engine(own).kappa) is not None:
                kappas.append(kappa)
        errors = [engine.ask(own, truth).error for truth in truths]
    except Exception as error:
        dtype = str(next(iter(own.leaves.values())).dtype).removeprefix("torch.")
        return replace(found, verdict="failed", reason=f"in {dtype}: {one_line(error)}")
    moved = (min(kappas), max(kappas)) if kappas else None
    found = replace(found, steps=_STEPS + len(errors), kappa=moved, own=max(errors, default=None))
    if found.own is not None and not found.own <= _IMPRECISE:
        reason = "right in float64, but hidden by rounding in the precision of the model's weights"
        advice = "probe more weights, look again when it has trained a little, or use .double()"
        return replace(found, verdict="imprecise", reason=reason, advice=advice)
    return found


def _is_wrong(alone: Sandbox, name: str, need: float, tolerance: float) -> bool:
    try:
        truth = measure(alone, alone.seed, need)
        return not Adapting(name, need).ask(alone, truth).error <= tolerance
    except Exception:  # inconclusive alone, or it cannot run alone: no evidence
        return False


def _fails(alone: Sandbox, name: str, kind: type[Exception]) -> bool:
    try:
        Adapting(name, 1.0).step(alone, alone.seed)
    except Exception as error:
        return type(error) is kind
    return False


def _named(report: EngineReport, culprit: ModuleCall | None) -> EngineReport:
    if culprit is None:
        return report
    return replace(report, module=culprit.name, kind=type(culprit.module).__name__)
