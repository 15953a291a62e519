"""Weights in half precision: the passes of an estimate run on copies in float32.

A step of a hundredth of a weight is two units in the last place of a bfloat16: nothing can be moved
there. So the modules hold float32 copies of their parameters and buffers while the passes run,
every other tensor in half precision is widened where it is used, and what comes out is the gradient
of the originals, rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.task import Task
from seht.tensors.graph import REGISTER

HALVES = (torch.float16, torch.bfloat16)
_TO_HALF = frozenset({torch.Tensor.half, torch.Tensor.bfloat16})
_PRODUCTS = dict.fromkeys(
    [
        *(F.linear, F.bilinear, F.scaled_dot_product_attention, F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm),
        *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm),
    ]
)
"""A dictionary, and not all there is: code that is being compiled looks into it."""
_KEEP = REGISTER | {torch.Tensor.copy_, torch.Tensor.data.__set__}  # type: ignore[attr-defined]


def widened(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A call with float32 in place of half precision, also where that is named (``x.half()``)."""
    if func in _KEEP:  # what is written into keeps its type, and a hook its tensor
        return func, args, kwargs
    if func in _TO_HALF:
        func = torch.Tensor.float
    return func, wide(args), {k: wide(v) for k, v in kwargs.items()}


def mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether float32 meets half precision in a product, where only autocast would allow it."""
    if func not in _PRODUCTS:
        return False
    single = half = False
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            single |= value.dtype is torch.float32
            half |= value.dtype in HALVES
    return single and half


def wide(value: Any) -> Any:
    """The same in float32: a tensor, the name of a type, or several of them."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALVES else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALVES else value
    if type(value) in (tuple, list):
        return type(value)(wide(item) for item in value)
    return value


class Copies:
    """Float32 copies of a model's parameters and buffers in half precision."""

    def __init__(self, task: Task) -> None:
        self._model = task.model
        self._names = {id(p): name for name, p in task.model.named_parameters()}
        self._copies: dict[int, tuple[Tensor, nn.Parameter]] = {}
        """By identity of a parameter: itself and its copy."""
        self._originals: dict[int, Tensor] = {}
        """By identity of a copy: the parameter."""
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for parameter in task.model.parameters():
            if parameter.dtype in HALVES:
                copy = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                self._copies[id(parameter)] = (parameter, copy)
                self._originals[id(copy)] = parameter
        weights = {
            n: self._copies[id(w)][1] if id(w) in self._copies else w
            for n, w in task.weights.items()
        }
        if any(w.dtype in HALVES for w in weights.values()):
            raise TypeError(
                "the probed tensors in half precision must be parameters of the model; keep them "
                "in float32"
            )
        self.task = replace(task, weights=weights)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The modules hold the copies while the block runs."""
        held: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for module in self._model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None and id(parameter) in self._copies:
                        held.append((module, name, parameter))
                        # By setattr: recurrent layers keep a list of their weights.
                        setattr(module, name, self._copies[id(parameter)][1])
                for name, buffer in list(module._buffers.items()):
                    if buffer is not None and buffer.dtype in HALVES:
                        copy = buffer.float()
                        self._buffers.append((module, name, buffer, copy))
                        module._buffers[name] = copy
            yield
        finally:
            for module, name, original in held:
                setattr(module, name, original)
            for module, name, held_buffer, _ in self._buffers:
                module._buffers[name] = held_buffer

    def original(self, leaf: Tensor) -> Tensor:
        """The parameter that a leaf is a copy of, or the leaf itself."""
        return self._originals.get(id(leaf), leaf)

    def refuse_originals(self, leaves: list[Tensor]) -> None:
        """An original in the graph was reached past its module, and would not move."""
        for leaf in leaves:
            if id(leaf) in self._copies:
                name = self._names[id(leaf)]
                raise RuntimeError(
                    f"the closure reaches the parameter {name!r}, which is in half precision, past "
                    "its module, where it cannot be replaced by its float32 copy; use "
                    "model.get_parameter(name) inside the closure, or keep the weights in float32"
                )

    def commit(self) -> None:
        """Buffers take over what the pass wrote into their copies."""
        for module, name, buffer, copy in self._buffers:
            now = module._buffers.get(name)
            if now is not buffer and now is not None:  # the closure has put another one there
                module._buffers[name] = now.to(buffer.dtype)
            else:
                buffer.data.copy_(copy)
