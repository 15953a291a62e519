"""HessianTrace, the one object users hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from seht import estimators, functional, probes
from seht.account import Guard
from seht.course import Course, PenaltySettings
from seht.curvature.boundary import check_boundary
from seht.engines import engine_options, make_engine
from seht.errors import check_count, check_positive, unknown, warn
from seht.estimators import Estimator
from seht.record import StepRecord
from seht.replay.closures import check_arguments
from seht.strength.arguments import filled_in, make_weight
from seht.strength.schedule import Schedule
from seht.strength.strength import Strength
from seht.strength.tuning import Tuning
from seht.strength.weight import WeightPath
from seht.task import Closure, split
from seht.tensors.undo import deliver, interruptible, kept_gradients


class HessianTrace:
    """Adds λ tr(H), the trace of the loss's Hessian in the weights, to a training loss.

    Example:
        ```python
        penalty = seht.HessianTrace(model, weight=1e-3, curvature="ggn")
        loss = penalty(lambda: F.cross_entropy(model(x), y))
        loss.backward()
        ```

    The result is one differentiable scalar, L + λ t, where t estimates the trace of the Hessian of
    L in the chosen weights (Liu, Yu and Lin, arXiv 2208.05924). If the closure returns ``(loss,
    aux)``, so does the call.

    A step is penalised when ``step >= warmup`` and ``(step - warmup) % every == 0``, counting from
    0. Every other step, and every step on which the estimator draws no layer, runs the closure once
    and does nothing else. :attr:`last` is a record of the last call.

    Cost: a penalised step takes about three plain ones, two with ``curvature="ggn"``. On the first
    few of them, and rarely later, the engine also checks its step size, with some six more passes.

    Without ``weight`` and ``share`` you get what follows from the study (``docs/evidence``): the
    Gauss-Newton trace, with a tuned weight if ``held_out`` is given (here, in the first call, or by
    an adapter) and a share of 2 if not.

    This is a plain object, not an ``nn.Module``, so a model may hold it. It can be pickled and
    copied, and with its ``state_dict`` a resumed run draws the same probes.

    Args:
        model: the module whose weights are probed.
        weight: λ, or a function of the step. ``"tuned"`` finds it on held-out data
            (:class:`seht.Tuning` has the settings, :mod:`seht.strength.tuning` the rule); give
            ``total_steps`` too, so that it can move fast enough for the length of the training
            (without it, one look moves log(weight) by at most 0.05). A :class:`seht.WeightPath`
            repeats the weights that another training found.
        share: instead of a weight, the norm of the penalty's gradient divided by that of the
            loss's own. Both are averaged over the first eight penalised steps, on which nothing is
            added to the loss yet. 2 is cautious: 4 gains more where wrong labels are learnt.
        follow: go on measuring the share on every penalised step, for one more backward pass each.
        estimator: ``"seht-h"`` (default), ``"seht-d"``, ``"seht-s"`` (a probe for each example,
            see :class:`seht.SehtS`), or an object such as ``seht.SehtD(prob=0.01)``.
        curvature: ``"hessian"`` for the whole Hessian, or ``"ggn"`` (recommended) for its
            Gauss-Newton part Jᵀ H_out J. That one costs two plain steps, is never negative where
            the loss is convex in the outputs, and is the Fisher trace for cross-entropy; terms of
            the loss that do not go through the outputs (an L2 term) add nothing to it. If not
            given: ``"hessian"`` with a number as ``weight``, ``"ggn"`` with a share or a tuned
            weight, and the path's own with a path.
        params: which tensors to probe: names, glob patterns or a predicate ``(name, tensor) ->
            bool``; by default the trainable ones of two or more dimensions.
        boundary: for ``"ggn"``, the name of the module whose outputs are the network's outputs, if
            it is not the model itself (a final ``log_softmax`` counts as part of the loss). The end
            of the name is enough if only one module's name ends so. You can also mark the outputs
            in the closure with :func:`seht.boundary`. A Hugging Face model that is given
            ``labels`` needs neither: its head is found.
        every: penalise each k-th step, with k times the weight; with k above 4 the gain was lost
            in trials.
        warmup: plain steps before the first penalised one, or, below 1, a fraction of the training
            (``warmup=0.1, total_steps=5000``).
        ramp: after the warm-up the weight grows linearly to its full size over this many steps, or
            over this fraction of the training.
        total_steps: how many optimiser steps the training has; the adapters for Lightning and
            Hugging Face fill it in.
        accumulate: how many calls make up one optimiser step (gradient accumulation).
        limit: bound the penalty to this multiple of the loss: it is multiplied by the detached
            factor min(1, limit * |loss| / |penalty|).
        held_out: tunes a weight that was not given: a pair ``(batches, loss_fn)`` of held-out
            batches (a ``DataLoader``, a list, a data set, or one batch) and
            ``loss_fn(model, batch)``; or give each call its own.
        optimizer: for a share or a tuned weight with Adam and its relatives: gradients are then
            compared as the optimiser applies them, each entry divided by its root mean square.
        engine: ``"difference"`` (what ``"auto"`` takes) or ``"autograd"``, see
            ``docs/engines.md``.
        on_nonfinite: what to do where the trace is NaN or infinite: ``"raise"``, or ``"skip"`` the
            penalty on that step, with one warning.
        seed: of the probes; ``None`` takes ``torch.initial_seed()``, without consuming it.
        options: the estimator's own: ``probes``, ``prob``, ``layer_prob``, ``rescale``,
            ``distribution``, ``batch_dim``, ``coupling``; the difference engine's: ``kappa`` (the
            step relative to the weights, adapted if not given) and ``two_sided`` (a more exact
            ``"ggn"`` for one and a third more passes); and for both engines ``precision``:
            ``"full"`` (default: all passes of a penalised step in float32, without autocast and
            TF32) or ``"native"`` (your own precision, with a larger step), see
            ``docs/precision.md``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float | Callable[[int], float] | WeightPath | Tuning | str | None = None,
        share: float | None = None,
        follow: bool = False,
        estimator: str | Estimator = "seht-h",
        curvature: str | None = None,
        params: probes.ParamSpec = None,
        boundary: str | None = None,
        every: int = 1,
        warmup: int | float = 0,
        ramp: int | float = 0,
        total_steps: int | None = None,
        accumulate: int = 1,
        limit: float | None = None,
        held_out: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        engine: str = "auto",
        on_nonfinite: str = "raise",
        seed: int | None = None,
        **options: Any,
    ) -> None:
        check_arguments(model, lambda: None)
        if isinstance(weight, HessianTrace):
            raise TypeError("weight is a penalty; give what it found: weight=penalty.path")
        weight, curvature = filled_in(weight, curvature)
        functional.check_curvature(curvature)
        check_count("accumulate", accumulate)
        check_positive("limit", limit, optional=True)
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(unknown("on_nonfinite", on_nonfinite, ["raise", "skip"]))
        if params is not None and not callable(params) and not isinstance(params, str):
            params = tuple(params)  # a generator would be empty at the second step
        way = make_weight(weight, share, follow, curvature)
        own, of_engine = functional.split_options(options)
        probed = estimators.make(estimator, own, HessianTrace, engine_options())
        check_boundary(model, boundary)
        schedule = Schedule(every, warmup, ramp, total_steps)
        schedule.warn_if_rare()
        strength = Strength(
            way, schedule, held_out=held_out, optimizer=optimizer, accumulate=accumulate
        )
        self._length_given = total_steps is not None
        seed = probes.check_seed(seed)
        worker = make_engine(engine, of_engine)
        functional.check_pair(worker, probed)
        settings = PenaltySettings(
            model, probed, curvature, params, boundary, accumulate, limit, on_nonfinite
        )
        self._course = Course(settings, worker, strength, seed)
        probes.choose(model, params)  # a bad choice should fail here, not in the first epoch
        whole = probes.quantised(model)
        if whole:
            warn(
                f"seht: {len(whole)} weights of the model are quantised ({whole[0]} is the first) "
                "and cannot be moved: the trace is that of the others, the adapters'."
            )

    # --- the two forms ------------------------------------------------------------------------

    def __call__(self, closure: Closure, *, on: Closure | None = None, held_out: Any = None) -> Any:
        """Run the closure and return ``loss + weight * trace`` (and aux, if it returns one).

        On a penalised step the closure runs 1 + 2K times with K probes (1 + K for the Gauss-Newton
        trace), so prints and metrics inside it repeat; :func:`seht.replaying` tells the extra runs.

        Args:
            closure: computes the loss, a scalar or ``(scalar, aux)``.
            on: takes the trace of this closure instead, say the loss on a quarter of the batch,
                which is cheaper. It runs on penalised steps only and moves no buffer.
            held_out: tunes a weight that was not given: computes the loss on examples that are not
                trained on, in the units of the training loss (both means, neither divided by the
                number of accumulated batches). It runs on the steps that adjust the weight, and
                moves neither buffers nor random state.
        """
        with self._course.whole() as undo:
            step = self._course.step(closure, on, undo, lean=False, held_out=held_out)
            if step.commit is not None:
                deliver()
                step.commit()
            return step.output

    def backward(
        self,
        closure: Closure,
        *,
        scaler: Any = None,
        on: Closure | None = None,
        held_out: Any = None,
    ) -> Any:
        """The lean form: add the gradient of ``loss + weight * trace`` to ``.grad`` at once.

        Only one graph is kept at a time, so a penalised step needs little more memory than a plain
        one. Returns the detached loss, without the penalty (and aux, if the closure returns one).
        ``scaler`` is a ``torch.amp.GradScaler``; the other arguments are those of a call. If a pass
        fails, ``.grad`` stays as it was.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("penalty.backward needs gradients; leave torch.no_grad() first")
        with self._course.whole() as undo:
            step = self._course.step(closure, on, undo, lean=True, scaler=scaler, held_out=held_out)
            total, aux, has_aux = split(step.output)
            loss = total.detach() if step.loss is None else step.loss
            if step.commit is not None:
                deliver()
            total = self._course.ranks.told(total)
            if step.commit is None:  # a plain step, and its backward the user's own
                with interruptible():
                    (total if scaler is None else scaler.scale(total)).backward()
            else:
                with kept_gradients(total):
                    (total if scaler is None else scaler.scale(total)).backward()
                step.commit()
        return (loss, aux) if has_aux else loss

    # --- around a training --------------------------------------------------------------------

    def lasts(self, total_steps: int) -> None:
        """Set ``total_steps``, unless the constructor was given one; frameworks call this."""
        check_count("total_steps", total_steps)
        if not self._length_given:
            self._course.strength.lasts(total_steps)

    def equip(
        self, *, held_out: Any = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Add held-out data or an optimiser made after the penalty; existing ones are kept."""
        self._course.strength.equip(held_out, optimizer)

    def close(self) -> None:
        """Call it at the end: it warns if the training was too short for a penalty to begin."""
        self._course.strength.close(self.step)

    def __enter__(self) -> HessianTrace:
        """``with seht.HessianTrace(...) as penalty:`` around a training calls :meth:`close`."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    @property
    def schedule(self) -> Schedule:
        """Which steps are penalised, and how the weight grows."""
        return self._course.strength.schedule

    @property
    def path(self) -> WeightPath | None:
        """The values of a tuned weight so far, to be given as ``weight=`` to another training."""
        path = self._course.strength.weight.path(self.schedule)
        if path is not None:
            return replace(path, curvature=self.curvature)
        if self._course.strength.weight.kind == "tuned":
            warn(
                "seht: penalty.path is None, because no weight was found yet, and weight=None is "
                "the default, a share of 2; train longer before you repeat a path"
            )
        return None

    @property
    def step(self) -> int:
        """The number of the step that the next call belongs to."""
        return self._course.number

    @property
    def last(self) -> StepRecord | None:
        """What the last call did; ``None`` before the first."""
        return self._course.account.last

    @property
    def guard(self) -> Guard:
        """Running means of loss, trace and penalty, from which warnings come."""
        return self._course.account.guard

    @property
    def model(self) -> nn.Module:
        """The module whose weights are probed."""
        return self._course.settings.model

    @property
    def estimator(self) -> Estimator:
        """How probes are drawn."""
        return self._course.settings.estimator

    @property
    def curvature(self) -> str:
        """``"hessian"`` or ``"ggn"``."""
        return self._course.settings.curvature

    @property
    def accumulate(self) -> int:
        """How many calls make up one optimiser step."""
        return self._course.settings.accumulate

    @property
    def seed(self) -> int:
        """The seed of the probes; with DDP or FSDP that of rank 0, once the ranks have agreed."""
        return self._course.seed

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step, seed, weight, the engine's step size, running means."""
        return self._course.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._course.load_state(state)

    def __repr__(self) -> str:
        """The settings that matter."""
        return (
            f"HessianTrace({type(self.model).__name__}, weight={self._course.strength.weight!r}, "
            f"estimator={self.estimator!r}, curvature={self.curvature!r}, "
            f"engine={self._course.engine.name!r}, step={self.step})"
        )
