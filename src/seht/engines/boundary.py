r"""The boundary between network and loss, which the Gauss-Newton matrix needs.

:math:`G = J^T H_{out} J`: J the derivative of the network's outputs z, :math:`H_{out}` the loss's
second derivative in z. The outputs are those of the outermost calls of the model in the closure,
of the module named by ``boundary=``, or what the closure marks with :func:`seht.boundary`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn

from seht.engines.base import Task
from seht.probes import clean_name

_active: ContextVar[Boundary | None] = ContextVar("seht_boundary", default=None)


def boundary(outputs: Any) -> Any:
    """Mark what the network puts out, inside a closure: ``logits = seht.boundary(logits)``.

    Use what it returns from there on. Outside a penalised step it returns its argument.
    """
    current = _active.get()
    return outputs if current is None else current.mark(outputs)


class Boundary:
    """Collects the outputs of a pass: aliases, so that only the loss lies behind them."""

    def __init__(self, task: Task) -> None:
        self._module = _find(task.model, task.boundary)
        self._named = task.boundary is not None
        self._depth = 0
        self._hooked: list[Tensor] = []
        self._marked: list[Tensor] = []
        self.cut = False
        """Give out leaves instead of aliases, so that the network's graph can go."""
        self.roots: list[Tensor] = []
        self.made: set[int] = set()
        """The identities of what was given out, for those who ask where a tensor comes from."""

    @property
    def outputs(self) -> list[Tensor]:
        """What the pass put out; marks win over the model's own outputs."""
        return self._marked or self._hooked

    def mark(self, outputs: Any) -> Any:
        """Take over a structure of tensors marked by the user."""
        return self._alias(outputs, self._marked)

    def __enter__(self) -> Boundary:
        self._hooked, self._marked, self.roots, self._depth = [], [], [], 0
        self._token: Token[Boundary | None] = _active.set(self)
        self._handles = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        _active.reset(self._token)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self._depth -= 1
        return self._alias(outputs, self._hooked) if self._depth == 0 else None

    def _alias(self, value: Any, found: list[Tensor]) -> Any:
        return _map(value, lambda tensor: self._take(tensor, found))

    def _take(self, tensor: Tensor, found: list[Tensor]) -> Tensor:
        if not tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        with torch._C.DisableTorchFunction():  # our own operations are no decisions of the model
            if self.cut:
                self.roots.append(tensor)
                found.append(tensor.detach().requires_grad_())
            else:
                found.append(tensor.view_as(tensor))
        self.made.add(id(found[-1]))
        return found[-1]

    def check(self, curved: bool) -> None:
        """Refuse a boundary behind which nothing is curved: the trace would silently be 0."""
        if not self.outputs:
            raise RuntimeError(
                'curvature="ggn": the closure never called the model'
                + (" part that boundary= names" if self._named else "")
                + ", so its outputs are unknown; mark them with seht.boundary(logits)"
            )
        if not curved:
            raise RuntimeError(
                'curvature="ggn": the loss is linear in the model\'s outputs (does the model '
                "return its own loss?), which would give a trace of 0; name the module whose "
                'output is the logits with boundary="module.name", or mark them in the closure '
                "with seht.boundary(logits)"
            )


def _find(model: nn.Module, name: str | None) -> nn.Module:
    if name is None:
        return model
    for raw, module in model.named_modules():
        if clean_name(raw) == clean_name(name):
            return module
    raise ValueError(
        f"boundary: the model has no module {name!r} (model.named_modules() lists them)"
    )


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with the function applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps the type, the outputs of Hugging Face included
        for key, item in value.items():
            changed[key] = _map(item, function)
        return changed
    if isinstance(value, tuple):
        items = [_map(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map(item, function) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(clone, field.name, _map(getattr(value, field.name), function))
        return clone
    return value
