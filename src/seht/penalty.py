"""HessianTrace, the one object users hold."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from seht import estimators, functional, probes
from seht.course import Course, PenaltySettings
from seht.curvature.boundary import check_boundary
from seht.engines import engine_options, make_engine
from seht.errors import unknown
from seht.estimators import Estimator
from seht.guards import Guard, warn
from seht.record import StepRecord
from seht.strength.arguments import filled_in, make_weight
from seht.strength.path import WeightPath
from seht.strength.schedule import Schedule, check_count
from seht.strength.strength import Strength
from seht.strength.tuning import Tuning
from seht.task import Closure, split
from seht.tensors.interrupts import deliver, interruptible
from seht.tensors.undo import kept_gradients


class HessianTrace:
    """Adds λ tr(H) to a training loss.

    Example:
        ```python
        penalty = seht.HessianTrace(model, weight=1e-3, curvature="ggn")
        loss = penalty(lambda: F.cross_entropy(model(x), y))
        loss.backward()
        ```

    The result is one differentiable scalar, L + λ t, where t estimates the trace of the Hessian of
    L in the chosen weights (Liu, Yu and Lin, arXiv 2208.05924). The closure may return ``(loss,
    aux)``; the call then returns ``(loss, aux)``.

    A step is penalised when ``step >= warmup`` and ``(step - warmup) % every == 0``, counting from
    0. Every other step, and every step on which the estimator draws no layer, is exactly the plain
    closure. :attr:`last` tells what the last call did.

    Cost: a penalised step is about three plain ones, two for ``curvature="ggn"``; the engine looks
    at its own step size on the first few and now and then, for some six more passes.

    With neither weight nor share it does what the study found best (``docs/evidence``): the
    Gauss-Newton trace, tuned where ``held_out`` is given here, else at a share of 2.

    This is a plain object, not an ``nn.Module``: a model may hold it. It can be pickled and copied,
    and ``state_dict`` makes a resumed run draw the same probes.

    Args:
        model: the module whose weights are probed.
        weight: λ, or a function of the step; ``"tuned"`` lets held-out data find it
            (:class:`seht.Tuning` has its settings, :mod:`seht.strength.tuning` the rule), and a
            :class:`seht.WeightPath` repeats the way of such a training on all the data. Give
            ``total_steps``, so that the weight moves as fast as the training's length needs;
            without it one look moves log(weight) by 0.05 at most.
        share: instead of a weight, the size of the penalty's gradient over that of the loss's own,
            both averaged over the first eight penalised steps, which are charged nothing. 2 is the
            study's.
        follow: measure the share on every penalised step, for one more backward pass each.
        estimator: ``"seht-h"`` (default), ``"seht-d"``, ``"seht-s"`` (a probe for each example,
            see :class:`seht.SehtS`), or an object such as ``seht.SehtD(prob=0.01)``.
        curvature: ``"hessian"``, which a number as weight means where nothing is said, or
            ``"ggn"``, which we recommend and which a share and a tuned weight mean (a path brings
            its own), for the trace of the Gauss-Newton part Jᵀ H_out J: two plain steps, never
            negative where the loss is convex in the outputs, and the Fisher trace for
            cross-entropy. Terms of the loss that reach the weights past the outputs (an L2 term)
            add nothing to it.
        params: which tensors: names, glob patterns or a predicate ``(name, tensor) -> bool``; by
            default the trainable ones of two or more dimensions.
        boundary: for ``"ggn"``, the module whose outputs are the network's, if not the model's own
            (before a final ``log_softmax``); the end of its name is enough where it is the only
            one. Or mark them in the closure with :func:`seht.boundary`. A Hugging Face model that
            is given ``labels`` needs neither: its head is found.
        every: penalise each k-th step, with k times the weight; more than 4 lost the gain in
            trials.
        warmup: plain steps before the first penalised one, or, below 1, a fraction of the training
            (``warmup=0.1, total_steps=5000``).
        ramp: penalised training starts with a small weight that grows over this many steps, or
            over a fraction.
        total_steps: how many optimiser steps the training has; Lightning's and Hugging Face's
            adapters and the lab know it themselves.
        accumulate: so many calls are one step (gradient accumulation).
        limit: multiply the penalty by the detached factor min(1, limit * |loss| / |penalty|).
        held_out: for ``weight="tuned"``, a pair ``(batches, loss_fn)`` of held-out batches (a
            ``DataLoader``, a list) and ``loss_fn(model, batch)``; or give each call its own.
        optimizer: lets a share or a tuned weight see gradients as Adam and its relatives do, each
            entry divided by its root mean square.
        engine: ``"auto"`` or an engine's name.
        on_nonfinite: ``"raise"``, or ``"skip"`` the penalty on that step with one warning.
        seed: of the probes; ``None`` takes ``torch.initial_seed()``, without consuming it.
        options: the estimator's own: ``probes``, ``prob``, ``layer_prob``, ``rescale``,
            ``distribution``, ``batch_dim``, ``coupling``; and the difference engine's:
            ``kappa`` (the relative step, adapted if not given), ``two_sided`` (a
            second-order ``"ggn"``); and for both engines ``precision``: ``"full"`` (default: all
            passes of a penalised step in float32, without autocast and TF32) or ``"native"`` (the
            user's own precision, with a larger step), see ``docs/precision.md``.
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
        functional.check_arguments(model, lambda: None)
        weight, share, curvature = filled_in(weight, share, curvature, tuned=held_out is not None)
        functional.check_curvature(curvature)
        check_count("accumulate", accumulate, 1)
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"limit must be a positive number or None, not {limit!r}")
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(unknown("on_nonfinite", on_nonfinite, ["raise", "skip"]))
        if params is not None and not callable(params) and not isinstance(params, str):
            params = tuple(params)  # a generator would be empty at the second step
        way = make_weight(weight, share, follow)
        own, of_engine = functional.split_options(options)
        named = [*inspect.signature(HessianTrace).parameters][1:-1]  # no model, no **options
        probed = estimators.make(estimator, own, [*named, *engine_options()])
        check_boundary(model, boundary)
        schedule = Schedule(every, warmup, ramp, total_steps)
        schedule.warn_if_rare()
        strength = Strength(way, schedule, held_out=held_out, optimizer=optimizer)
        self._length_given = total_steps is not None
        seed = functional.check_seed(seed)
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

        The closure runs 1 + 2K times with K probes (1 + K for the Gauss-Newton trace): prints and
        metrics inside it repeat, unless they ask :func:`seht.replaying`.

        ``on`` takes the trace of another closure, say the loss on a quarter of the batch, which
        costs less and says nearly as much. It runs on penalised steps only and moves no buffer.

        ``held_out``, for ``weight="tuned"``, computes the loss on examples that are not trained on;
        it runs when the weight is looked at, and moves neither buffers nor random state.
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
        """The lean form: compute the gradient of ``loss + weight * trace`` into ``.grad``.

        One graph lives at a time, so that a penalised step needs little more memory than a plain
        one. Returns the detached loss, without the penalty (and aux, if the closure returns one).
        ``scaler`` is a ``torch.amp.GradScaler``. Nothing is added to ``.grad`` if a pass fails.
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
        """The length of the training, from whoever knows it; one that was given stays."""
        check_count("total_steps", total_steps, 1)
        if not self._length_given:
            self._course.strength.lasts(total_steps)

    def equip(
        self, *, held_out: Any = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """What a framework makes later than the penalty; what was given stays."""
        self._course.strength.equip(held_out, optimizer)

    def close(self) -> None:
        """The training is over: warn if it ended in the warm-up, so that nothing was penalised."""
        self.schedule.warn_if_unused(self.step)

    def __enter__(self) -> HessianTrace:
        """Around a training: ``with seht.HessianTrace(...) as penalty:`` closes it at the end."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    @property
    def schedule(self) -> Schedule:
        """When steps are penalised."""
        return self._course.strength.schedule

    @property
    def path(self) -> WeightPath | None:
        """The way that a tuned weight took so far, for ``weight=`` of another training."""
        path = self._course.strength.weight.path(self.schedule)
        return None if path is None else replace(path, curvature=self.curvature)

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
        """Running means over the penalised steps."""
        return self._course.account.guard

    @property
    def model(self) -> nn.Module:
        """Whose weights are probed."""
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
        """So many calls are one step."""
        return self._course.settings.accumulate

    @property
    def seed(self) -> int:
        """Of the probes; on several ranks the first one's, once they have agreed."""
        return self._course.seed

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to draw the same probes and keep its guard rails."""
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
