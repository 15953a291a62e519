"""The functions beside :class:`seht.HessianTrace`, and the argument checks that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seht import estimators, probes
from seht.course import make_task
from seht.distributed import ranks_of
from seht.engines import Engine, engine_options, make_engine
from seht.engines.autograd import refuse_per_sample
from seht.errors import unknown
from seht.estimators import Estimator
from seht.operators.orders import refuse_wrong
from seht.operators.safe_forms import safe_ops
from seht.precision.policy import Precision
from seht.replay.checkpoints import checkpoints
from seht.replay.closures import check_arguments
from seht.replay.mode import Casts
from seht.replay.state import BorrowedBuffers
from seht.task import Closure, Estimate, Task, check_loss, split
from seht.tensors.second_derivatives import refuse_once, solid
from seht.tensors.undo import deliver, uninterrupted

CURVATURES = ("hessian", "ggn")


def hessian_trace(
    model: nn.Module,
    closure: Closure,
    *,
    estimator: str | Estimator = "seht-h",
    engine: str = "auto",
    curvature: str = "hessian",
    params: probes.ParamSpec = None,
    boundary: str | None = None,
    seed: int | None = None,
    **options: Any,
) -> Tensor:
    """Estimate tr(H) of the closure's loss, as the mean of sᵀ H s over random probes s.

    Returns a 0-dim tensor that is differentiable in every leaf of the loss (a plain value under
    ``torch.no_grad()``, and 0 without a graph if the estimator draws no layer). Buffers such as
    BatchNorm statistics stay as they were. The global random state ends where one run of the
    closure leaves it; if no layer is drawn, the closure does not run.

    Cost: 1 + 2 K runs of the closure and as many backward passes, with K probes; 1 + K for `"ggn"`.

    Example:
        ```python
        trace = seht.hessian_trace(model, lambda: loss_fn(model, batch), probes=10, seed=0)
        trace.backward()  # its gradient, a third derivative of the loss
        ```

    Args:
        model: the module whose weights are probed.
        closure: computes the loss, a scalar or ``(scalar, aux)``.
        estimator: ``"seht-h"``, ``"seht-d"``, ``"seht-s"`` or an estimator object.
        engine: ``"difference"`` (what ``"auto"`` takes) or ``"autograd"``.
        curvature: ``"hessian"``, or ``"ggn"`` for the Gauss-Newton part Jᵀ H_out J.
        params: which tensors to probe, as in :class:`seht.HessianTrace`.
        boundary: for ``"ggn"``, the name of the module whose outputs are the network's outputs, if
            it is not the model itself.
        seed: of the probes; ``None`` takes ``torch.initial_seed()``, without consuming it.
        options: the estimator's own, such as ``probes`` or ``prob``, and the engine's, such as
            ``kappa``.
    """
    worker, task = _prepare(
        hessian_trace, model, closure, estimator, engine, curvature, params, boundary, seed, options
    )
    if task is None:
        return _zero(model)
    with ranks_of(model).aside(), uninterrupted(), task.random.undone():
        return worker.estimate(task).trace


def loss_and_trace(
    model: nn.Module,
    closure: Closure,
    *,
    estimator: str | Estimator = "seht-h",
    engine: str = "auto",
    curvature: str = "hessian",
    params: probes.ParamSpec = None,
    boundary: str | None = None,
    seed: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Loss and trace of one training step, both differentiable, for an objective of your own.

    Returns ``(loss, trace)``, or ``(loss, trace, aux)`` if the closure returns ``(loss, aux)``.
    Arguments and cost are those of :func:`seht.hessian_trace`. Unlike that function this is the
    step's own forward pass, so BatchNorm statistics move, once.

    Example:
        ```python
        loss, trace = seht.loss_and_trace(model, lambda: loss_fn(model, batch), seed=0)
        (loss + 1e-3 * trace.clamp(min=0)).backward()
        ```
    """
    worker, task = _prepare(
        loss_and_trace, model, closure,
        estimator, engine, curvature, params, boundary, seed, options,
    )  # fmt: skip
    with ranks_of(model).call(lean=False) as call:
        if task is None:
            output = closure()
            estimate = Estimate(check_loss(split(output)[0], graph=False), _zero(model), output)
        else:
            call.penalise()
            with uninterrupted(), task.random.undone():
                estimate = worker.estimate(replace(task, closure=call.checked(task.closure)))
                deliver()
                estimate.commit()
        _, aux, has_aux = split(estimate.output)
        pair = (estimate.loss, estimate.trace)
        return call.finish((*pair, aux) if has_aux else pair)


def exact_trace(model: nn.Module, closure: Closure, *, params: probes.ParamSpec = None) -> Tensor:
    """The exact tr(H) = Σ ∂²L/∂wᵢ², entry by entry.

    Returns a 0-dim tensor without a graph; buffers stay as they were.

    Cost: one backward pass for each entry of the chosen weights, so it is for small models and
    tests.

    Args:
        model: the module whose weights are meant.
        closure: computes the loss, a scalar or ``(scalar, aux)``.
        params: which tensors, as in :class:`seht.HessianTrace`.

    Example:
        ```python
        print(seht.exact_trace(model, lambda: loss_fn(model, batch)))
        ```
    """
    check_arguments(model, closure)
    ranks_of(model).need_whole("seht.exact_trace")
    chosen = list(probes.choose(model, params).tensors.values())
    precision = Precision()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        BorrowedBuffers(model),
        precision.around(chosen),
    ):
        with Casts(precision, safe_ops), safe_ops(), precision.run(), checkpoints():
            loss = check_loss(split(closure())[0])
        refuse_once(
            [loss],
            chosen,
            "use seht.hessian_trace with many probes instead, or compute its backward with "
            "differentiable operations and drop the mark",
        )
        refuse_wrong([loss], chosen, 2, "use seht.hessian_trace with many probes instead")
        gradients = torch.autograd.grad(loss, chosen, create_graph=True, allow_unused=True)
        solid(gradients)
        total = loss.new_zeros((), dtype=torch.float64)
        for weight, gradient in zip(chosen, gradients, strict=True):
            if gradient is None or not gradient.requires_grad:
                continue
            for i, entry in enumerate(gradient.flatten()):
                (row,) = torch.autograd.grad(
                    entry, weight, retain_graph=True, materialize_grads=True
                )
                total += row.flatten()[i].detach()
    return total.to(loss.dtype)


def check_curvature(curvature: str) -> None:
    """Refuse an unknown curvature."""
    if curvature not in CURVATURES:
        raise ValueError(unknown("curvature", curvature, CURVATURES))


def check_pair(engine: Engine, estimator: Estimator) -> None:
    """Refuse an estimator that the engine cannot serve, before the first step."""
    if engine.name == "autograd":
        refuse_per_sample(estimator)


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The estimator's options and the engine's."""
    engine = {k: v for k, v in options.items() if k in engine_options()}
    return {k: v for k, v in options.items() if k not in engine}, engine


def _prepare(
    caller: Callable[..., object],
    model: nn.Module,
    closure: Closure,
    estimator: str | Estimator,
    engine: str,
    curvature: str,
    params: probes.ParamSpec,
    boundary: str | None,
    seed: int | None,
    options: dict[str, Any],
) -> tuple[Engine, Task | None]:
    check_arguments(model, closure)
    ranks_of(model).need_whole("a trace outside HessianTrace")
    check_curvature(curvature)
    own, engines = split_options(options)
    estimator_object = estimators.make(estimator, own, caller, engine_options())
    task = make_task(
        model,
        closure,
        probes.choose(model, params),
        estimator_object,
        probes.check_seed(seed),
        curvature=curvature,
        boundary=boundary,
        differentiable=torch.is_grad_enabled(),
    )
    worker = make_engine(engine, engines)
    check_pair(worker, estimator_object)
    return worker, task


def _zero(model: nn.Module) -> Tensor:
    return next(model.parameters()).new_zeros(())
