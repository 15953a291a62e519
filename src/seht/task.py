"""The input and output of an engine, `Task` and `Estimate`, and what both engines share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seht import probes as draw
from seht.estimators import Estimator, SehtS
from seht.tensors.memory import is_dtensor, own_part

Closure = Callable[[], Any]
"""Computes the loss: a scalar, or ``(scalar, aux)``."""

LossFn = Callable[[nn.Module, Any], Any]
"""``loss_fn(model, batch)``: the mean loss of a batch, a scalar or ``(scalar, aux)``."""

Directions = dict[str, Tensor]
"""One probe: for each drawn tensor its part of the direction, int8 signs or floating numbers."""


class Probe(Directions):
    """One probe, with the seeds its parts were drawn from. Parts that it does not hold, to save
    memory, are drawn again whenever they are read.
    """

    def __init__(
        self, seeds: dict[str, int], part: Callable[[str], Tensor], *, signs: bool
    ) -> None:
        super().__init__()
        self.seeds, self._part, self.signs = seeds, part, signs
        """``signs``: whether every entry is 1 or -1."""

    def __missing__(self, name: str) -> Tensor:
        return self._part(name)


_LARGE = 1 << 18
"""Parts with fewer entries than this are kept: redrawing them would save no memory to speak of."""


@dataclass(frozen=True)
class Task:
    """The description of one estimate: everything an engine needs, for one call only."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    """The model and its parts, collected once because walking through them takes time."""
    closure: Closure
    weights: dict[str, Tensor]
    """The drawn tensors by name, in the model's order."""
    indices: tuple[int, ...]
    """Their places among all chosen tensors; with the seed they determine the probes."""
    named: frozenset[str]
    """Tensors the user asked for by name: it is an error if the loss does not use them."""
    count: int
    """How many tensors were chosen, drawn or not."""
    estimator: Estimator
    seed: int
    curvature: str = "hessian"
    boundary: str | None = None
    """For the Gauss-Newton trace: the module whose outputs are the network's."""
    differentiable: bool = True
    weight: float = 0.0
    limit: float | None = None
    most: float | None = None
    """A larger trace counts as if it were this large (``strength/weight.py``)."""
    skip: bool = False
    """Leave the penalty out if the estimate is not finite."""
    apart: bool = False
    """In the lean form too, compute the gradients of loss and trace separately."""
    random: Any = None
    """The caller's ``RandomState``, which is told of generators that the closure uses."""

    @classmethod
    def to_measure(
        cls,
        model: nn.Module,
        closure: Closure,
        chosen: draw.Chosen,
        estimator: Estimator,
        seed: int,
        curvature: str,
        boundary: str | None,
    ) -> Task:
        """The task of measuring a value, without gradient, with all chosen weights."""
        count = len(chosen.tensors)
        return cls(
            model, tuple(model.modules()), closure, chosen.tensors, tuple(range(count)),
            chosen.named, count, estimator, seed, curvature, boundary, differentiable=False,
        )  # fmt: skip

    @property
    def examples(self) -> SehtS | None:
        """The estimator, where every example has a probe of its own."""
        return self.estimator if isinstance(self.estimator, SehtS) else None

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The model's parameters."""
        return parameters_of(self.modules)

    @property
    def constant(self) -> bool:
        """Whether the trace's coefficient is known before the trace is."""
        return self.limit is None and self.most is None and not self.skip

    def coefficient(self, loss: Tensor, trace: Tensor) -> Tensor:
        """The factor of the trace: the weight, reduced by ``limit`` and ``most``, as a constant."""
        factor = trace.detach().new_full((), self.weight, dtype=torch.float64)
        if self.constant:
            return factor
        loss, trace = loss.detach().double(), trace.detach().double()
        if self.limit is not None:
            size = (self.weight * trace).abs()
            factor = factor * torch.where(size > 0, self.limit * loss.abs() / size, 1).clamp(max=1)
        if self.most is not None:
            size = trace.abs()
            factor = factor * torch.where(size > 0, self.most / size, 1).clamp(max=1)
        return torch.where(trace.isfinite(), factor, 0.0) if self.skip else factor

    def probes(self, *, frugal: bool = False) -> Iterator[Probe]:
        """The probes of this task, one after the other. With ``frugal``, large parts made of signs
        are redrawn when needed instead of kept: drawing them is as fast as reading them.
        """
        signs = self.estimator.signs
        redraw = frugal and signs and self.examples is None
        redraw = redraw and not any(is_dtensor(w) for w in self.weights.values())
        for k in range(self.estimator.probes):
            names = zip(self.indices, self.weights, strict=True)
            seeds = {name: draw.entry_seed(self.seed, k, index) for index, name in names}
            probe = Probe(seeds, partial(self._part, seeds), signs=signs)
            for name, w in self.weights.items():
                if not redraw or w.numel() < _LARGE:
                    probe[name] = self._part(seeds, name)
            yield probe

    def _part(self, seeds: dict[str, int], name: str) -> Tensor:
        w = self.weights[name]
        part = own_part(self.estimator.entries(w.shape, seeds[name], w.device), w)
        # Small parts are kept in the weights' dtype, large ones as int8, a quarter of that.
        small = w.numel() < _LARGE and not part.is_floating_point()
        return part.to(w.dtype) if small else part


@dataclass
class Estimate:
    """An engine's answer. ``loss`` and ``trace`` are differentiable where the task asks for it."""

    loss: Tensor
    trace: Tensor
    output: Any
    """What the closure returned (in the difference engine: its centre pass)."""
    unused: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    """With per-sample probes: the tensors that kept one direction for all examples."""
    error: float | None = None
    total: Tensor | None = None
    """In the lean form: loss + coefficient * trace, its gradient computed and waiting."""
    own: Tensor | None = None
    """For a sharded model: this rank's own loss; ``loss`` is the mean over ranks."""
    learn: Callable[[], float | None] | None = None
    """Called if the step succeeds: the engine keeps its new step; returns the relative error."""
    commit: Callable[[], None] = lambda: None
    """Called if the step succeeds: keeps what the pass wrote into buffers such as statistics."""


def parameters_of(modules: Iterable[nn.Module]) -> tuple[Tensor, ...]:
    """The parameters that these modules hold, each once; ``model.parameters()`` would walk through
    the model again.
    """
    found = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    return tuple(found.values())


def split(output: Any) -> tuple[Any, Any, bool]:
    """``(loss, aux, has_aux)`` of what a closure returned."""
    if isinstance(output, tuple) and len(output) == 2:
        return output[0], output[1], True
    return output, None, False


def check_loss(loss: Any, *, graph: bool = True) -> Tensor:
    """Refuse what cannot be a loss. Whether it is finite is checked later, with other values."""
    if inspect.isgenerator(loss) or inspect.iscoroutine(loss):
        loss.close()
        raise TypeError(
            f"the closure is a {type(loss).__name__} function; it must return the loss: write "
            "return in place of yield, and def in place of async def"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the closure must return a scalar tensor or (scalar tensor, aux), not {_told(loss)}"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"the loss must be a scalar, not of shape {tuple(loss.shape)}; return the loss and not "
            "the model's outputs, and reduce it with .mean()"
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"the loss must be floating, not {loss.dtype}; return a differentiable loss such as "
            "cross-entropy, not a count"
        )
    if loss.is_meta:
        raise ValueError(
            "the loss is on the meta device and has no value; load the model's weights, or "
            "to_empty(device=...) them, and compute the loss on a real device"
        )
    if graph and not loss.requires_grad:
        raise RuntimeError(
            "the loss has no graph (requires_grad is False); compute it from the model's "
            "parameters, without detach() or no_grad() on the way"
        )
    return loss


def _told(value: Any) -> str:
    """The error message for what a closure returned in place of a loss."""
    if value is None:
        return "None; its last line should return the loss"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}; put the rest into one aux: return loss, (a, b)"
    name = type(value).__name__
    if hasattr(value, "keys"):
        return f"{name}; return its loss, as in output.loss or output['loss']"
    return f"{name}; return the loss itself, not loss.item()"


def refuse_scripted(modules: Sequence[nn.Module], engine: str) -> None:
    """Refuse scripted code: it hides its operators, which can neither be replaced nor frozen."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            name = name_of(module, modules)
            raise RuntimeError(
                f"{'module ' + repr(name) if name else 'the model'} is scripted, which hides its "
                f"operators from engine={engine!r}; pass the module as it was before torch.jit"
            )


def refuse_parallel(modules: Sequence[nn.Module]) -> None:
    """Refuse modules that couple devices or ranks within a pass."""
    for module in modules:
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise RuntimeError(
                f"{_called(module, modules)} is a DataParallel on {len(module.device_ids)} "
                "devices, whose replicas run in threads that no decision can be frozen in; use "
                "DistributedDataParallel, one process for each device"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training and _ranks_of(module) > 1:
            raise RuntimeError(
                f"{_called(module, modules)} is a SyncBatchNorm, which mixes the examples of all "
                "ranks while every rank probes a direction of its own; use BatchNorm, whose "
                "statistics are each rank's own, or put this layer into evaluation mode on "
                "penalised steps"
            )


def _called(module: nn.Module, modules: Sequence[nn.Module]) -> str:
    name = name_of(module, modules)
    return repr(name) if name else "the model"


def _ranks_of(module: nn.SyncBatchNorm) -> int:
    together = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(module.process_group) if together else 1


def name_of(module: nn.Module, modules: Sequence[nn.Module]) -> str:
    """The name of a part of a model, given all of them; that of the whole is empty."""
    return next((name for name, part in modules[0].named_modules() if part is module), "")


def report_unused(task: Task, unused: list[str]) -> tuple[str, ...]:
    """Unused tensors count as zero, unless the user named them: then it is likely a mistake."""
    for name in unused:
        if name in task.named:
            raise ValueError(
                f"the loss does not depend on parameter {name!r}, which params= names; "
                "remove it from params or use it in the closure"
            )
    return tuple(unused)


def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Inner product of two lists of tensors."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
