"""A private float64 copy of the user's problem that can be evaluated again and again."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seht import functional, probes
from seht.check.tape import Tape
from seht.estimators import SehtH
from seht.replay.buffers import BorrowedBuffers
from seht.task import Task, check_loss, split

LossFn = Callable[[nn.Module, Any], Any]
Gradient = dict[str, Tensor]


class Sandbox:
    """The loss of a model copy on a batch copy: the same randomness and buffers every time.

    Args:
        model: the copy; it is used, and its weights are moved and put back.
        loss_fn: computes the loss from model and batch.
        batch: the copy; each evaluation gets a copy of its own.
        params: which tensors are probed.
        seed: of the randomness inside the model (dropout).
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, batch: Any, params: probes.ParamSpec, seed: int
    ) -> None:
        self.model, self.loss_fn, self.batch = model, loss_fn, batch
        self.params, self.seed = params, seed
        self.chosen = probes.choose(model, params)
        self.leaves = {
            probes.clean_name(name): tensor
            for name, tensor in model.named_parameters()
            if tensor.requires_grad
        }

    def closure(self) -> Any:
        """The loss, with the random state it always starts from."""
        _seed_everything(self.seed)
        return self.loss_fn(self.model, double(self.batch))

    def gradient(
        self, shift: Gradient | None = None, step: float = 0.0, tape: Tape | None = None
    ) -> tuple[float, Gradient]:
        """Loss and ordinary gradient at ``weights + step * shift``; the weights come back."""
        moved = {name: self.leaves[name] for name in shift or ()}
        before = {name: tensor.detach().clone() for name, tensor in moved.items()}
        try:
            with torch.no_grad():
                for name, tensor in moved.items():
                    tensor.add_(shift[name], alpha=step)  # type: ignore[index]
            with ordinary(), BorrowedBuffers(self.model):
                with tape or nullcontext():
                    loss = check_loss(split(self.closure())[0])
                parts = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=True)
        finally:
            with torch.no_grad():
                for name, tensor in moved.items():
                    tensor.copy_(before[name])
        gradient = {
            name: torch.zeros_like(leaf) if part is None else part.detach().to_dense()
            for (name, leaf), part in zip(self.leaves.items(), parts, strict=True)
        }
        return loss.item(), gradient

    def task(self, seed: int) -> Task:
        """One SEHT-H probe over all chosen tensors, as an engine is asked for it."""
        task = functional.make_task(self.model, self.closure, self.chosen, SehtH(), seed)
        assert task is not None  # SEHT-H draws every tensor
        return task

    def nearby(self) -> Sandbox:
        """The same problem at weights a little aside, where none of them is exactly zero.

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
        return Sandbox(model, self.loss_fn, self.batch, self.params, self.seed)


@contextmanager
def ordinary() -> Iterator[None]:
    """Gradients on, whatever the caller has switched off; compiled modules run uncompiled."""
    eager = torch.compiler.set_stance("force_eager")
    with torch.inference_mode(False), torch.enable_grad(), eager:
        yield


@contextmanager
def own_randomness() -> Iterator[None]:
    """Everything random in the block is the block's own: torch, ``random`` and NumPy."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if cuda else []
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def copy_model(model: nn.Module) -> nn.Module:
    """A float64 copy that shares nothing with the model."""
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
    return copied.double()


def double(value: Any) -> Any:
    """A copy with every floating tensor in float64: tuples, lists, mappings, dataclasses."""
    if isinstance(value, Tensor):
        wide = {True: torch.float64, False: value.dtype}[value.is_floating_point()]
        if value.is_complex():
            wide = torch.complex128
        return value.detach().to(wide, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(double, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(double, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: double(item) for key, item in value.items()})
        return copied
    if isinstance(value, Mapping):
        return {key: double(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{f: double(getattr(value, f)) for f in fields})
    return value


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
