"""``seht.doctor(model, loss_fn, data)``: everything to know before the two lines are written."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import nn

from seht.check import CheckReport, check
from seht.doctor.cost import measure_cost
from seht.doctor.curvatures import CurvatureChoice, choose_curvature
from seht.doctor.patient import Patient
from seht.doctor.regime import find_regime
from seht.doctor.report import DoctorReport, two_lines
from seht.doctor.shares import PROBES, measure_shares
from seht.measure.keep import untouched
from seht.measure.progress import Report, Reporter
from seht.probes import check_seed
from seht.task import LossFn

_STAGES = ("curvature", "gradient", "regime", "share", "cost")
_SHORT = 5.0
"""The smallest budget in seconds with which a model can be examined."""
_BRIEF = 0.005
"""In a plain step shorter than this many seconds, overhead counts for more than arithmetic."""


def doctor(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    held_out: Any = None,
    *,
    seed: int = 0,
    budget: float = 120.0,
    progress: Report = None,
) -> DoctorReport:
    """Examine a model before you train it with the penalty L + λ tr(H).

    The report says whether the penalty's gradient is right (:func:`seht.check`), which curvature to
    take and why, with which ``boundary=``, what each form costs in time and memory compared with a
    plain step on this machine, which share (the norm of the penalty's gradient over that of the
    loss's) each power of ten of the weight has, whether the model memorises or underfits, and which
    two lines to paste. It works on a copy: weights, buffers, gradients, modes and random state of
    your model stay as they are, whatever happens.

    Example:
        ```python
        print(seht.doctor(model, loss_fn, loader, budget=10))
        ```

    Cost: about ``budget`` seconds.

    Args:
        model: the module, in the mode it trains in.
        loss_fn: ``loss_fn(model, batch)`` computes the loss *with the model it is given*: a copy.
        data: training data: a batch, a data set or an iterable of batches; at most sixteen batches
            are read.
        held_out: the same, of examples that are not trained on; without it the regime stays
            unknown.
        seed: of probes and of randomness inside the model.
        budget: about how many seconds it may take. With little time, figures are measured less
            well, and the report says how well; the check of the gradient takes half of it, and
            always as long as one direction needs.
        progress: ``True`` for a line on standard error, or a function called with each
            :class:`seht.measure.Progress`.
    """
    seed = check_seed(seed)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be a number of seconds, not {budget!r}")
    if not _SHORT <= budget < math.inf:
        raise ValueError(f"budget must be at least {_SHORT:g} seconds, not {budget!r}")
    start = time.perf_counter()
    stages = _Stages(progress, _STAGES[0])
    try:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        with untouched(model, seed):
            patient = Patient(model, loss_fn, data, held_out, budget / 10)
            return _examine(patient, seed, start, budget, stages)
    finally:
        stages.close()


def _examine(
    patient: Patient, seed: int, start: float, budget: float, stages: _Stages
) -> DoctorReport:
    def left(share: float) -> float:
        """Seconds: a share of what is left, or of the budget if nothing is left."""
        rest = start + budget - time.perf_counter()
        return share * max(rest, budget / 10)

    stages.begin("curvature")
    choice = choose_curvature(patient, seed)
    stages.begin("gradient")
    checks = _checks(patient, choice, seed, start + budget / 2)
    report = next((check for check in checks if check.ok), checks[0])
    engine = next(iter(report.engines))
    stages.begin("regime")
    regime = find_regime(patient, choice.boundary, time.perf_counter() + left(0.2))
    stages.begin("share")
    end = time.perf_counter() + left(0.5)
    shares = measure_shares(patient, choice, engine, seed, end, stages.tell)
    stages.begin("cost")
    costs = measure_cost(patient, choice, seed, left(0.8))
    notes = []
    mode = "train" if patient.model.training else "eval"
    if mode == "eval":
        notes.append(
            "the model is in evaluation mode and was measured in it; call model.train() first, as "
            "the training does"
        )
    if patient.compiled:
        notes.append("the model is compiled and was examined uncompiled: its own costs are others")
    if not report.ok and len(checks) == 1:
        notes.append(
            "there was no time to check engine='autograd', which may be right here; raise budget="
        )
    if shares.probes < PROBES:
        notes.append(f"time was short: {shares.probes} probes for the share in place of {PROBES}")
    if shares.vanishes:
        notes.append(
            f"over {shares.probes} probes neither the trace nor its gradient can be told from 0, "
            "and the shares are those of noise"
        )
    elif shares.noise > 0.5:
        notes.append(
            f"{100 * shares.noise:.0f} % of the penalty's averaged gradient (in square) is noise "
            f"of the {shares.probes} probes, here as in share= itself"
        )
    if shares.trace < -2 * shares.trace_stderr:
        notes.append(
            "the trace is negative, and the penalty, which lowers it further, has no lower bound: "
            "start later (warmup=), and bound it with limit=0.5"
        )
    if costs.seconds < _BRIEF:
        notes.append("a plain step is so short that costs are mostly those of Python's overhead")
    notes.append(
        "with Adam and its relatives add optimizer=optimizer: shares are then measured as it sees "
        "gradients, and differ from the table"
    )
    return DoctorReport(
        model=type(patient.model).__name__,
        mode=mode,
        check=report,
        engine=engine,
        choice=choice,
        costs=costs,
        shares=shares,
        regime=regime,
        lines=two_lines(choice, engine, held_out=bool(patient.held_out), aux=patient.aux),
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def _checks(patient: Patient, choice: CurvatureChoice, seed: int, end: float) -> list[CheckReport]:
    """Check the recommended engine; if it fails and there is time, also the other, slow one."""
    found = []
    for engine in ("difference", "autograd"):
        found.append(
            check(
                patient.model,
                patient.loss_fn,
                patient.few,
                engines=engine,
                directions=2,
                seed=seed,
                curvature=choice.curvature,
                boundary=choice.boundary,
                budget=max(0.0, end - time.perf_counter()),
            )
        )
        if found[-1].ok or time.perf_counter() > end:
            break
    return found


class _Stages(Reporter):
    """Reports how far the whole examination has come, in per cent."""

    def begin(self, name: str) -> None:
        """The next stage."""
        self._what, self._written = name, False  # never too soon after the stage before
        self.tell(0, 1)

    def tell(self, done: int, total: int) -> None:
        """A part of it is done."""
        self(round(100 * (_STAGES.index(self._what) + done / total) / len(_STAGES)), 100)
