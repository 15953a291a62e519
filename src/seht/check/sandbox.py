"""A private float64 copy of the user's problem that can be evaluated again and again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seht import probes
from seht.check.tape import Tape
from seht.course import make_task
from seht.errors import one_line
from seht.estimators import Estimator, SehtH
from seht.replay.state import BorrowedBuffers
from seht.task import LossFn, Task, check_loss, split
from seht.tensors.random_state import seed_cpu
from seht.tensors.trees import mapped

Gradient = dict[str, Tensor]
_DRAWS = 10_000
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_RANDOM = (
    *("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli", "binomial", "poisson"),
    *("bernoulli_", "uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_"),
)


@dataclasses.dataclass(frozen=True)
class Form:
    """Which penalty is checked: the arguments of :class:`seht.HessianTrace` that it depends on."""

    curvature: str = "hessian"
    boundary: str | None = None
    estimator: Estimator = dataclasses.field(default_factory=SehtH)


class Sandbox:
    """The loss of a model copy on a batch copy: the same randomness and buffers every time.

    Args:
        model: the copy; it is used, and its weights are moved and put back.
        loss_fn: computes the loss from model and batch.
        batch: the copy; each evaluation gets a copy of its own.
        params: which tensors are probed.
        seed: of the randomness inside the model (dropout).
        form: what is estimated.
        wide: whether copies are in float64, and what the model casts to less stays there.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        params: probes.ParamSpec,
        seed: int,
        form: Form | None = None,
        *,
        wide: bool = True,
    ) -> None:
        self.model, self.loss_fn, self.batch = model, loss_fn, batch
        self.params, self.seed, self.form, self.wide = params, seed, form or Form(), wide
        self.chosen = probes.choose(model, params)
        self.leaves = {
            probes.clean_name(name): tensor
            for name, tensor in model.named_parameters()
            if tensor.requires_grad
        }

    def closure(self) -> Any:
        """The loss, with the random state it always starts from."""
        torch.manual_seed(self.seed)
        seed_cpu(self.seed)
        with Widened() if self.wide else nullcontext():
            return self.loss_fn(self.model, copied(self.batch, wide=self.wide))

    def gradient(
        self, shift: Gradient | None = None, step: float = 0.0, tape: Tape | None = None
    ) -> tuple[float, Gradient]:
        """Loss and ordinary gradient at ``weights + step * shift``; the weights come back."""
        with self.at(shift, step), ordinary(), BorrowedBuffers(self.model):
            with tape or nullcontext():
                loss = check_loss(split(self.closure())[0])
            leaves = list(self.leaves.values())
            parts = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        dense = (part.detach().to_dense() for part in parts)
        return loss.item(), dict(zip(self.leaves, dense, strict=True))

    @contextmanager
    def at(self, shift: Gradient | None, step: float) -> Iterator[None]:
        """Move the weights by ``step * shift`` in the block."""
        moved = {name: self.leaves[name] for name in shift or ()}
        before = {name: tensor.detach().clone() for name, tensor in moved.items()}
        try:
            with torch.no_grad():
                for name, tensor in moved.items():
                    tensor.add_(shift[name], alpha=step)  # type: ignore[index]
            yield
        finally:
            with torch.no_grad():
                for name, tensor in moved.items():
                    tensor.copy_(before[name])

    def task(self, seed: int) -> Task:
        """The task of one estimate, with this seed or the next one that draws a layer."""
        form = self.form
        for k in range(_DRAWS):
            task = make_task(
                self.model,
                self.closure,
                self.chosen,
                form.estimator,
                probes.mix(seed, k) if k else seed,
                curvature=form.curvature,
                boundary=form.boundary,
            )
            if task is not None:
                return task
        raise ValueError(
            f"{form.estimator.name} drew no layer in {_DRAWS} steps, so that there is nothing to "
            "check; raise prob= or layer_prob="
        )

    def nearby(self) -> Sandbox:
        """The same problem with slightly moved weights; none stays exactly zero.

        A kink may lie exactly where training starts, and a layer that starts from zero hides
        whatever is wrong behind it.
        """
        model = copy_model(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in model.parameters():
            if not tensor.requires_grad:
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            size = tensor.detach().square().mean().sqrt().item() / 100
            if size == 0:
                size = (tensor.shape[0] / tensor.numel()) ** 0.5 if tensor.dim() > 1 else 0.1
            with torch.no_grad():
                tensor.add_(noise.to(tensor), alpha=size)
        return Sandbox(model, self.loss_fn, self.batch, self.params, self.seed, self.form)


class Widened(TorchFunctionMode):
    """Turns the model's own casts to float32 and less (Hugging Face's losses) into float64, but
    not the numbers that it draws.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every type that is asked for is float64."""
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return Tensor.double(*args)
        if getattr(func, "__name__", "") in _RANDOM:
            return _drawn(func, args, kwargs or {})

        def wide(value: Any) -> Any:
            narrow = isinstance(value, torch.dtype) and value in _NARROW
            return torch.float64 if narrow else value

        return func(*map(wide, args), **{name: wide(v) for name, v in (kwargs or {}).items()})


def _drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Drawn in float32, as the model's own passes draw: float64 makes other numbers of a seed."""
    given = [*args, *kwargs.values()]
    asked = any(isinstance(v, torch.dtype) or _is_wide(v) for v in given)

    def narrow(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float32 if value in (torch.float64, *_NARROW) else value
        return value.float() if _is_wide(value) else value

    out = func(*map(narrow, args), **{name: narrow(v) for name, v in kwargs.items()})
    if func.__name__.endswith("_"):
        return args[0].copy_(out)
    return out.double() if asked and out.is_floating_point() else out


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


@contextmanager
def ordinary() -> Iterator[None]:
    """Gradients on, whatever the caller has switched off; compiled modules run uncompiled."""
    eager = torch.compiler.set_stance("force_eager")
    with torch.inference_mode(False), torch.enable_grad(), eager:
        yield


def copy_model(model: nn.Module, *, wide: bool = True) -> nn.Module:
    """A float64 copy (or one as precise as the model) that shares nothing with it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        # Results kept from an earlier pass (as by hook-based weight norm) refuse to be copied.
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"the model cannot be copied ({one_line(error)}), and the check works on a copy only; "
            "make copy.deepcopy(model) work, for example by deleting cached tensors first"
        ) from error
    for parameter in copied.parameters():
        parameter.grad = None
    return copied.double() if wide else copied


def copied(value: Any, *, wide: bool = True) -> Any:
    """A copy of a batch, every floating tensor in float64 or in its own type."""

    def one(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if wide and (tensor.is_floating_point() or tensor.is_complex()):
            dtype = torch.complex128 if tensor.is_complex() else torch.float64
        return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

    return mapped(value, one)
