r"""Can the penalty's gradient be trusted on *this* model? ``seht.check(model, loss_fn, batch)``.

The gradient of a Hessian-trace penalty is a third derivative, and an operator whose double backward
is wrong makes it silently wrong. The check compares every engine's trace and gradient with a
numerical truth made of ordinary gradients only (:mod:`seht.check.truth`), on a float64 copy of
the user's own model and batch, and names the module that breaks an engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from seht import estimators, functional, probes
from seht.check.judge import Truths, judge
from seht.check.report import CheckReport, EngineReport
from seht.check.sandbox import Form, Sandbox, copied, copy_model
from seht.curvature.boundary import check_boundary
from seht.distributed import ranks_of
from seht.engines import ENGINES, make_engine
from seht.errors import check_count, one_line
from seht.estimators import Estimator
from seht.replay.closures import check_arguments
from seht.replay.state import BorrowedBuffers
from seht.task import LossFn, check_loss, split
from seht.tensors.random_state import own_randomness

__all__ = ["CheckReport", "EngineReport", "check"]


def check(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    engines: str | Iterable[str] | None = None,
    curvature: str = "hessian",
    boundary: str | None = None,
    estimator: str | Estimator = "seht-h",
    params: probes.ParamSpec = None,
    directions: int = 3,
    seed: int = 0,
    tolerance: float = 1e-3,
    budget: float | None = None,
    **options: Any,
) -> CheckReport:
    """Check the penalty's value and gradient on your own model and batch, for every engine.

    For random probes s the trace t = sᵀ H s (or sᵀ G s) and its gradient in *all* trainable
    parameters are compared with differences of ordinary gradients g, at two step sizes e that must
    agree: t ≈ s · (g(w+es) − g(w−es)) / 2e and ∇t ≈ (g(w+es) + g(w−es) − 2g(w)) / e². An engine
    runs as in a training, one step after the other while it adapts its own step size: on a float64
    copy, and then in the precision of the model's weights. Your model, gradients, buffers, batch
    and random state stay as they are.

    Example:
        ```python
        report = seht.check(model, loss_fn, (x[:4], y[:4]), curvature="ggn", engines="difference")
        print(report)  # in words; report.ok, report.engines["difference"].verdict
        ```

    Cost: some hundred gradients for each direction; give a small model and a few examples.

    A verdict is ``"trusted"``, ``"wrong"`` (with the module that breaks the engine, if a single one
    does), ``"imprecise"`` (right in float64, but lost in the rounding of the model's own
    precision), ``"failed"`` (the engine raised an error) or ``"inconclusive"`` (nothing could be
    measured).

    Args:
        model: the module, in the mode (train or eval) it is to be checked in.
        loss_fn: ``loss_fn(model, batch)`` computes the loss *with the model it is given*: a copy.
        batch: anything; floating tensors in tuples, lists and mappings are taken to float64.
        engines: names; all of them by default.
        curvature: as in :class:`seht.HessianTrace`, like ``boundary`` and ``estimator``: give what
            you will train with.
        boundary: for ``"ggn"``, the name of the module whose outputs are the network's outputs.
        estimator: a name or an object. For ``"seht-s"`` there is no such reference; the check only
            sees whether it runs.
        params: the probed tensors, as in :class:`seht.HessianTrace`.
        directions: the number of random probes.
        seed: of the probes and of randomness inside the model.
        tolerance: the relative error up to which an engine is trusted. With a wrong operator the
            error is some tenths; the noise of one probe is some 400 %.
        budget: seconds after which no further direction is measured and no further module is
            tried. One direction is always measured; the report says how many were.
        options: the estimator's own.
    """
    check_arguments(model, loss_fn, "loss_fn")
    if isinstance(batch, DataLoader):
        raise TypeError("batch must be one batch, not a DataLoader; give next(iter(loader))")
    check_count("directions", directions)
    seed = probes.check_seed(seed)
    if not 1e-6 <= tolerance < 1:
        raise ValueError(f"tolerance must be in [1e-6, 1), not {tolerance!r}")
    if budget is not None and not (isinstance(budget, (int, float)) and budget >= 0):
        raise ValueError(f"budget must be a number of seconds or None, not {budget!r}")
    end = math.inf if budget is None else time.perf_counter() + budget
    functional.check_curvature(curvature)
    check_boundary(model, boundary)
    form = Form(curvature, boundary, estimators.make(estimator, options, check))
    if engines is None:
        engines = "auto" if isinstance(form.estimator, estimators.SehtS) else ENGINES
    names = [make_engine(n).name for n in ([engines] if isinstance(engines, str) else engines)]
    if not names:
        raise ValueError(f"engines is empty; name some of {', '.join(ENGINES)}, or leave it out")
    for name in names:
        functional.check_pair(make_engine(name), form.estimator)
    ranks_of(model).need_whole("seht.check")
    narrow = any(w.dtype != torch.float64 for w in probes.choose(model, params).tensors.values())

    def copy(wide: bool) -> Sandbox:
        parts = copy_model(model, wide=wide), loss_fn, copied(batch, wide=wide)
        return Sandbox(*parts, params, seed, form, wide=wide)

    with torch.inference_mode(False), own_randomness():
        box = copy(True)
        loss = _first_look(box)
        box.task(seed)  # an estimator that draws nothing is refused here
        own = copy(False) if narrow else None
        truths = Truths(box, seed, tolerance / 4, end)
        reports = {name: judge(box, name, truths, directions, tolerance, own) for name in names}
    return CheckReport(
        engines={name: _advise(report, reports) for name, report in reports.items()},
        model=type(model).__name__,
        tensors=len(box.chosen.tensors),
        weights=sum(tensor.numel() for tensor in box.chosen.tensors.values()),
        loss=loss,
        curvature=curvature,
        boundary=boundary,
        estimator=form.estimator.name,
    )


def _first_look(box: Sandbox) -> float:
    """The loss on the copy, or an error that says what is the matter with ``loss_fn``."""
    try:
        with torch.enable_grad(), BorrowedBuffers(box.model):
            loss = split(box.closure())[0]
    except Exception as error:
        raise RuntimeError(
            f"loss_fn(model, batch) failed on a float64 copy of both: {one_line(error)}; "
            "it must work with the model it is given and create no float32 tensors of its own"
        ) from error
    loss = check_loss(loss)
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()} on this batch; check with a batch that trains")
    used = torch.autograd.grad(loss, list(box.chosen.tensors.values()), allow_unused=True)
    if all(part is None for part in used):
        raise ValueError(
            "the loss depends on none of the chosen parameters of the model given to loss_fn; "
            "compute it with that argument, which is a copy, and not with a model from outside"
        )
    return loss.item()


def _advise(report: EngineReport, reports: dict[str, EngineReport]) -> EngineReport:
    """Say which engine to use instead, if one is known to be right or needs nothing but first
    derivatives.
    """
    if report.verdict in ("trusted", "inconclusive") or "use engine=" in (report.reason or ""):
        return report
    others = [name for name, other in reports.items() if other.verdict == "trusted"]
    if not others and report.engine == "autograd" and "difference" not in reports:
        others = ["difference"]
    return replace(report, advice=f"use engine={others[0]!r}") if others else report
