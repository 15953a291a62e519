r"""The reference engine: the paper's Algorithms 1 and 2 as printed, by nested autograd.

Both algorithms are one loop. Algorithm 1 (SEHT-H) draws :math:`\sigma` from Rademacher over all
chosen weights, Algorithm 2 (SEHT-D) from :math:`Q(p)` over the layers drawn in this step::

    for i = 1 to maxIter:
        sigma ~ Rademacher(n)  or  Q(p)
        v = g . sigma                      (g: the gradient of the loss)
        h = dv / d omega
        t = sigma^T . h
        trace += t
    return trace / maxIter

Every step of it stays in the graph, so that the estimate itself has a gradient: a third
derivative of the loss. The fused operators that are wrong there are replaced while the closure
runs (:mod:`seht.operators.safe_forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from seht.curvature.boundary import Boundary
from seht.curvature.flat_losses import NotTwice, look, make_of
from seht.curvature.output_curvature import bent_along, slope
from seht.distributed import LOCAL, Ranks
from seht.estimators import SehtS
from seht.operators.orders import refuse_wrong
from seht.operators.safe_forms import safe_ops
from seht.precision.policy import Precision, check_precision, prepared
from seht.replay.checkpoints import checkpoints
from seht.replay.closures import alone
from seht.replay.mode import Casts, meet_again
from seht.replay.replayer import extra_run
from seht.replay.state import BorrowedBuffers
from seht.replay.witness import unrepeatable
from seht.task import (
    Directions,
    Estimate,
    Task,
    check_loss,
    dot,
    refuse_parallel,
    refuse_scripted,
    report_unused,
    split,
)
from seht.tensors.graph import hooks_of, muted, quiet
from seht.tensors.process import own_gradients
from seht.tensors.random_state import RandomState
from seht.tensors.second_derivatives import refuse_once, solid
from seht.tensors.undo import uninterrupted

ONCE = (
    "use engine='difference', which needs first derivatives only, or compute its backward with "
    "differentiable operations and drop the mark"
)
"""What to do about a function that has a first derivative only."""
WRONG = "use engine='difference', which needs first derivatives only"
"""What to do about an operator whose higher derivatives are wrong."""


def refuse_per_sample(estimator: object) -> None:
    """Refuse SEHT-S: its probes are made by rules of the difference engine."""
    if isinstance(estimator, SehtS):
        raise ValueError(
            "estimator='seht-s' needs engine='difference' (or 'auto'): engine='autograd' has one "
            "probe for all examples"
        )


class AutogradEngine:
    """Exact to rounding for every operator with two more derivatives; some ten plain steps."""

    name = "autograd"
    kappa = None

    def __init__(self, *, precision: str = "full") -> None:
        self.precision = check_precision(precision)
        self._looked: set[frozenset[str]] = set()
        """For the Gauss-Newton trace: the makes of loss whose curvature was looked at."""

    def estimate(
        self, task: Task, ranks: Ranks = LOCAL, *, lean: bool = False, watch: bool = False
    ) -> Estimate:
        """Loss and trace with one forward pass and nested gradients; ``lean`` changes nothing."""
        refuse_scripted(task.modules, self.name)
        refuse_parallel(task.modules)
        refuse_compiled(task.model)
        refuse_per_sample(task.estimator)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            uninterrupted(),
            alone(task.weights.values()),
            own_gradients(),
            prepared(task, self.precision) as (task, precision),
        ):
            weights = list(task.weights.values())
            boundary = Boundary(task) if task.curvature == "ggn" else None
            random = RandomState(task.model.parameters(), task.random)
            start = random.read()
            with BorrowedBuffers(task.model) as buffers, boundary or nullcontext():
                output, heard = _run(task, precision, random)
            loss = source = check_loss(split(output)[0])
            hooks = hooks_of([*task.modules, *buffers.modules_beside])
            if hooks or heard:
                precision.hear()
                again = BorrowedBuffers(task.model, buffers.others)
                with _repeated(random, start), again, muted(hooks), boundary or nullcontext():
                    repeated, _ = _run(task, precision, random, again=True)
                source = check_loss(split(repeated)[0])
            if boundary is not None:
                boundary.settle(source)
            refuse_once([source], weights, ONCE)
            refuse_wrong([source], weights, 3 if task.differentiable else 2, WRONG)
            with _explained(), quiet(weights):
                if boundary is None:
                    trace, unused = hutchinson(source, task)
                else:
                    trace, unused = gauss_newton(source, boundary, task, self._looked)
            solid([trace])
            if precision.wide or (lean and precision.apart):
                loss, trace = precision.handed_on([loss, trace])
        if not task.differentiable:
            loss, trace = loss.detach(), trace.detach()
        commit = precision.committing(buffers.commit)
        output = precision.given_out(output)
        return Estimate(loss, trace, output, unused, error=0.0, commit=commit)

    def state(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""

    def back(self) -> Callable[[], None]:
        """Nothing to restore."""
        return lambda: None


def _run(
    task: Task, precision: Precision, random: RandomState, *, again: bool = False
) -> tuple[Any, bool]:
    """What the closure returns, and whether it asked for hooks; with ``again`` hooks are off."""
    meet = partial(meet_again, random) if again else random.meet
    casts = Casts(precision, safe_ops, partial(BorrowedBuffers, task.model), meet=meet)
    with casts, safe_ops(deaf=again) as mode, precision.run(), checkpoints():
        output = task.closure()
    return output, mode.hooked


@contextmanager
def _repeated(random: RandomState, start: list[Tensor]) -> Iterator[None]:
    """Another run of the closure in the block, with the random numbers of the first."""
    end = random.end()
    random.begin(start)
    try:
        with extra_run():
            yield
        if not random.equals(end):
            raise unrepeatable("it drew other random numbers than before")
    finally:
        random.finish(end)


def hutchinson(loss: Tensor, task: Task) -> tuple[Tensor, tuple[str, ...]]:
    """The loop of Algorithms 1 and 2 over the task's probes."""
    omega = {n: w for n, w in task.weights.items() if w.requires_grad}  # the closure may freeze
    g = torch.autograd.grad(loss, list(omega.values()), create_graph=True, allow_unused=True)
    solid(g)
    gradient = {n: part for n, part in zip(omega, g, strict=True) if part is not None}
    unused = report_unused(task, [n for n in task.weights if n not in gradient])
    trace = loss.new_zeros(())
    for sigma in task.probes():
        trace = trace + product(gradient, sigma, task)
    return trace * (task.estimator.scale / task.estimator.probes), unused


def product(gradient: dict[str, Tensor], sigma: Directions, task: Task) -> Tensor:
    r""":math:`\sigma^T H \sigma`: two inner products and one more gradient."""
    omega = [task.weights[name] for name in gradient]
    direction = [sigma[name].to(w.dtype) for name, w in zip(gradient, omega, strict=True)]
    if not omega:
        return next(iter(task.weights.values())).new_zeros(())
    v = dot(list(gradient.values()), direction)
    if not v.requires_grad:  # the loss is linear in these weights
        return v.new_zeros(())
    h = torch.autograd.grad(
        v, omega, create_graph=task.differentiable, retain_graph=True, materialize_grads=True
    )
    return dot(list(h), direction)


def gauss_newton(
    loss: Tensor, boundary: Boundary, task: Task, looked: set[frozenset[str]]
) -> tuple[Tensor, tuple[str, ...]]:
    r""":math:`z'^T H_{out} z'` with :math:`z' = J\sigma`, exactly.

    :math:`J\sigma` is the derivative of :math:`\sigma \cdot J^T u` in u (two reverse passes):
    forward mode is wrong through fused norms and has no rule for many kernels.
    """
    z = boundary.outputs
    gradient, curved = slope(loss, z) if z else ([], False)
    boundary.check(curved)
    make = make_of(loss, z)
    if make not in looked:
        look(gradient, z)
        looked.add(make)
    omega = {n: w for n, w in task.weights.items() if w.requires_grad}  # the closure may freeze
    u, found = pulled_back(z, list(omega.values()))
    backward = {n: part for n, part in zip(omega, found, strict=True) if part is not None}
    unused = report_unused(task, [n for n in task.weights if n not in backward])
    trace = loss.new_zeros(())
    for sigma in task.probes():
        pairs = [(part * sigma[n].to(part.dtype)).sum() for n, part in backward.items()]
        if not pairs:
            break
        direction = torch.autograd.grad(
            torch.stack(pairs).sum(), u, create_graph=True, materialize_grads=True
        )
        product = bent_along(gradient, z, direction, graph=True)
        trace = trace + dot(product, list(direction))
    return trace * (task.estimator.scale / task.estimator.probes), unused


def pulled_back(
    z: list[Tensor], weights: list[Tensor]
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    """Some u of the outputs' shape, and :math:`J^T u` as a function of it."""
    u = [torch.zeros_like(part, requires_grad=True) for part in z]
    return u, torch.autograd.grad(z, weights, u, create_graph=True, allow_unused=True)


@contextmanager
def _explained() -> Iterator[None]:
    """Add advice to PyTorch's errors about missing derivatives."""
    try:
        yield
    except CheckpointError as error:
        raise RuntimeError(
            "activation checkpointing recomputes its part of the model in the backward pass, where "
            "engine='autograd' cannot replace what is wrong at the third order; switch it off on "
            "penalised steps"
        ) from error
    except NotTwice:  # of the loss: the other engine would need it, too
        raise
    except RuntimeError as error:
        if "double backward" in str(error) or "not implemented" in str(error):
            raise RuntimeError(
                f"an operator of the model has no second derivative ({error}); "
                "use engine='difference', which needs first derivatives only"
            ) from error
        raise


def refuse_compiled(model: nn.Module) -> None:
    """Refuse compiled code: it has no double backward."""
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise RuntimeError(
                f"{'module ' + repr(name) if name else 'the model'} is compiled, and torch.compile "
                "has no double backward, which engine='autograd' needs; pass the uncompiled "
                "module, or use engine='difference'"
            )
