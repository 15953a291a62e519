"""Which module breaks an engine: the same check on each module alone, with the inputs it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seht.check.sandbox import Sandbox, copied, ordinary
from seht.probes import clean_name
from seht.replay.state import BorrowedBuffers
from seht.tensors.trees import mapped, tensors


@dataclass(frozen=True)
class ModuleCall:
    """One module, the arguments of its first call in the forward pass, and what it calls."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inner: int


def blame(
    box: Sandbox, breaks: Callable[[Sandbox], bool], over: Callable[[], bool] = lambda: False
) -> ModuleCall | None:
    """The first innermost module that breaks the engine on its own; ``None`` if none does before
    the time is over.

    Modules that call no others are tried first, in the order of the forward pass, then those
    around them: a module of the user's own may do the damage between its children. None is to
    blame for what breaks on the plainest network too.
    """
    plainest = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    control = isolate(
        ModuleCall("", plainest, (torch.ones(2, 3, dtype=torch.float64),), {}, 0), box
    )
    if control is None or breaks(control):
        return None
    for call in sorted(calls(box), key=lambda call: call.inner):
        if over():
            return None
        alone = isolate(call, box)
        if alone is not None and breaks(alone):
            return call
    return None


def calls(box: Sandbox) -> list[ModuleCall]:
    """Every module that the loss calls with gradients on, in order of their first call."""
    names = {id(module): clean_name(name) for name, module in box.model.named_modules()}
    found: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and id(module) not in found:
            found[id(module)] = (module, copied(args), copied(kwargs))

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for module in box.model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        with ordinary(), BorrowedBuffers(box.model):
            box.closure()
    finally:
        for handle in handles:
            handle.remove()
    return [
        ModuleCall(
            names[key], module, args, kwargs, sum(id(m) in found for m in module.modules()) - 1
        )
        for key, (module, args, kwargs) in found.items()
    ]


def isolate(call: ModuleCall, box: Sandbox) -> Sandbox | None:
    """A problem of the module's own in the same form; ``None`` where nothing is differentiable."""
    alone = _Alone(call)
    try:
        with ordinary(), BorrowedBuffers(alone), torch.no_grad():
            outputs = list(_floats(alone()))
        if not outputs or not any(p.requires_grad for p in alone.parameters()):
            return None
        smooth, form = _Smooth(outputs, box.seed), replace(box.form, boundary=None)
        return Sandbox(alone, smooth, None, lambda name, tensor: True, box.seed, form)
    except Exception:  # a module that only runs in its place in the model
        return None


class _Alone(nn.Module):
    """A module as a function of its weights and of its floating inputs, which become weights."""

    def __init__(self, call: ModuleCall) -> None:
        super().__init__()
        self.inner = call.module
        self.args, self.kwargs = call.args, call.kwargs
        self.inputs = nn.ParameterList(
            tensor.detach().clone() for tensor in _floats((call.args, call.kwargs))
        )

    def forward(self) -> Any:
        """Clones, since the module may write into its inputs."""
        inputs = iter([tensor.clone() for tensor in self.inputs])

        def fill(tensor: Tensor) -> Tensor:
            return next(inputs) if tensor.is_floating_point() else tensor

        args, kwargs = mapped((self.args, self.kwargs), fill)
        return self.inner(*args, **kwargs)


class _Smooth:
    r"""A loss with derivatives of every order: :math:`\sum r \sin(z / \|z\|_{rms})`, r random."""

    def __init__(self, outputs: list[Tensor], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._signs = [
            torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z) for z in outputs
        ]
        self._sizes = [z.square().mean().sqrt().item() or 1.0 for z in outputs]

    def __call__(self, module: nn.Module, batch: None) -> Tensor:
        terms = zip(_floats(module()), self._signs, self._sizes, strict=True)
        return torch.stack([(r * (z / size).sin()).sum() for z, r, size in terms]).sum()


def _floats(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors(value) if tensor.is_floating_point())
