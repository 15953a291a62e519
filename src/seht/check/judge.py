"""One engine against the truth: the verdict, and who is to blame."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from seht.check.blame import Call, blame
from seht.check.report import EngineReport
from seht.check.sandbox import Sandbox, one_line
from seht.check.truth import Inconclusive, Truth, asymmetry, measure
from seht.engines import make_engine
from seht.probes import mix

_MORE = 3
"""Further probes where only one of them disagrees."""


class Truths:
    """The truth along one random probe after the other, measured when asked for and kept.

    Every second one belongs to a copy at weights a little aside (:meth:`Sandbox.nearby`).
    """

    def __init__(self, box: Sandbox, seed: int, need: float) -> None:
        self._boxes = (box, box.nearby())
        self._seed, self.need = seed, need
        self._found: list[tuple[Sandbox, Truth]] = []
        self._tried = 0
        self.reason = ""
        """Why the last probe that gave nothing did so."""

    def take(self, count: int) -> list[tuple[Sandbox, Truth]]:
        """``count`` of them, or fewer where half of the probes give nothing."""
        while len(self._found) < count and self._tried < 2 * count:
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


def ask(box: Sandbox, truth: Truth, name: str, need: float) -> Answer:
    """The engine's answer to the truth's task, used as a training step uses it.

    The gradient is that of loss + trace, in one backward pass; the loss's own is taken off again.
    It is compared as a whole and tensor by tensor, where the truth is sharp enough for that: a
    module near the input may be wrong and yet add little to the whole.
    """
    with torch.inference_mode(False), torch.enable_grad():
        estimate = make_engine(name).estimate(box.task(truth.seed))
        total = estimate.loss + estimate.trace
        parts = torch.autograd.grad(total, list(box.leaves.values()), allow_unused=True)
    gradient = {
        n: -truth.base[n] if part is None else part.detach().to_dense() - truth.base[n]
        for n, part in zip(box.leaves, parts, strict=True)
    }
    flat = torch.cat([part.flatten() for part in gradient.values()])
    sharp = [m.error(gradient[n].flatten()) for n, m in truth.parts.items() if m.noise < need]
    loss = abs(estimate.loss.item() - truth.loss) / max(abs(truth.loss), 1e-12)
    value = truth.trace.error(estimate.trace.detach().double().cpu())
    return Answer(max(value, loss), max(truth.whole.error(flat), *sharp, 0.0))


def judge(
    box: Sandbox, name: str, truths: Truths, directions: int, tolerance: float
) -> EngineReport:
    """Compare along ``directions`` probes, and along some more where a single one disagrees."""
    answers: list[Answer] = []
    bad: list[int] = []
    try:
        for count in (directions, directions + _MORE):
            known = truths.take(count)
            answers += [ask(*pair, name, truths.need) for pair in known[len(answers) :]]
            bad = [k for k, answer in enumerate(answers) if not answer.error <= tolerance]
            if len(bad) != 1:
                break
        if not answers:
            make_engine(name).estimate(box.task(0))  # whether it runs at all can still be seen
            return EngineReport(name, "inconclusive", reason=truths.reason)
    except Exception as error:
        kind = type(error)
        culprit = blame(box, lambda alone: _fails(alone, name, kind))
        return _named(EngineReport(name, "failed", reason=one_line(error)), culprit)
    found = EngineReport(name, "trusted", max(a.error for a in answers), len(answers))
    if not bad:
        return found
    if len(bad) == 1:  # two steps agreed on a wrong truth by accident, or it is rarely wrong
        reason = f"one direction of {len(answers)} disagrees with the truth, the others agree"
        return replace(found, verdict="inconclusive", reason=reason)
    where, truth = known[bad[0]]
    skew = asymmetry(where, truth, mix(truth.seed))
    if skew > tolerance:
        reason = (
            f"the ordinary gradient belongs to no loss (its Jacobian is asymmetric by {skew:.1g}), "
            "as behind gradient reversal or another custom backward; there is no Hessian then"
        )
        return replace(found, verdict="inconclusive", reason=reason)
    culprit = blame(where, lambda alone: _is_wrong(alone, name, truths.need, tolerance))
    if max(answers[k].value for k in bad) > tolerance:
        reason = "already the trace itself is off: a second derivative is wrong"
    else:
        reason = "the trace itself is right: a third derivative is wrong"
    if culprit is None:
        reason += "; no single module is to blame: look between modules, or at the engine itself"
    return _named(replace(found, verdict="wrong", reason=reason), culprit)


def _is_wrong(alone: Sandbox, name: str, need: float, tolerance: float) -> bool:
    try:
        truth = measure(alone, alone.seed, need)
        return not ask(alone, truth, name, need).error <= tolerance
    except Exception:  # inconclusive alone, or it cannot run alone: no evidence
        return False


def _fails(alone: Sandbox, name: str, kind: type[Exception]) -> bool:
    try:
        estimate = make_engine(name).estimate(alone.task(alone.seed))
        total = estimate.loss + estimate.trace
        torch.autograd.grad(total, list(alone.leaves.values()), allow_unused=True)
    except Exception as error:
        return type(error) is kind
    return False


def _named(report: EngineReport, culprit: Call | None) -> EngineReport:
    if culprit is None:
        return report
    return replace(report, module=culprit.name, kind=type(culprit.module).__name__)
