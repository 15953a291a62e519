"""Structures of tensors, as calls are given and return them: tuples, lists, mappings, records."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seht.tensors.memory import duplicate

StandIns = dict[int, tuple[Tensor, Tensor]]
"""By identity of a result: the result and the leaf that stands for it."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a structure, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif hasattr(type(value), "keys"):
        for key in value:
            yield from tensors(value[key])
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with the function applied to every tensor, in order."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps the type, the outputs of Hugging Face included
        for key, item in value.items():
            changed[key] = mapped(item, function)
        return changed
    if isinstance(value, Mapping):
        items = {key: mapped(item, function) for key, item in value.items()}
        return type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple):
        parts = [mapped(item, function) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        named = type(value).__module__ == "torch.return_types"
        return type(value)(parts) if named else tuple(parts)
    if isinstance(value, list):
        return [mapped(item, function) for item in value]
    if _is_record(value):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(clone, field.name, mapped(getattr(value, field.name), function))
        return clone
    return value


def copies(value: Any) -> Any:
    """The same structure with a copy of every tensor, none of which has a graph."""
    return mapped(value, duplicate)


def stand_in(out: Any, stand_ins: StandIns) -> Any:
    """A leaf for each tensor of the centre's graph: its gradient goes on into that graph."""

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = (tensor, tensor.detach().requires_grad_())
        return stand_ins[id(tensor)][1]

    return mapped(out, leaf)


def alike(a: Any, b: Any) -> bool:
    """Whether two structures hold equal tensors."""
    ours, theirs = list(tensors(a)), list(tensors(b))
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(ours, theirs, strict=True)
    )


def is_batch(data: Any) -> bool:
    """Whether this is one batch: a tensor, or a structure that holds one at its top."""
    if isinstance(data, list):  # [(x, y), (x, y)] is a list of batches
        return bool(data) and all(isinstance(value, Tensor) for value in data)
    if _is_record(data):
        data = tuple(getattr(data, field.name) for field in dataclasses.fields(data))
    if isinstance(data, Mapping):
        data = tuple(data.values())
    items = data if isinstance(data, tuple) else (data,)
    return any(isinstance(value, Tensor) for value in items)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
