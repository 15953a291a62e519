"""Finds the examples in the model's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils.rnn import PackedSequence

from seht.operators.axes import Axis, axis_from
from seht.persample.errors import TRANSFORMED, no_sum
from seht.persample.tags import Tags


class Inputs:
    """Tags the arguments of the model's outermost calls."""

    def __init__(self, model: nn.Module, tags: Tags) -> None:
        self._model = model
        self._tags = tags
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tag what the outermost calls of the model are given."""
        modules = list(self._model.modules()) if self._tags.layout.deep else [self._model]
        handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            with torch._C.DisableTorchFunction():
                self._begin((args, kwargs))

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._depth -= 1

    def _begin(self, value: Any) -> None:
        if isinstance(value, PackedSequence):
            self._begin_packed(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._begin(item)
        elif isinstance(value, dict) or hasattr(value, "keys"):
            for key in value:
                self._begin(value[key])
        elif isinstance(value, Tensor) and id(value) not in self._tags.own:
            tags = self._tags
            if is_functorch_wrapped_tensor(value) and torch.is_grad_enabled():
                raise no_sum(TRANSFORMED, tags.layout.dim)
            if not self._new(value):
                return
            for dim in (tags.layout.dim, 1 - tags.layout.dim):
                if value.dim() > dim >= 0 and tags.found(value.shape[dim]):
                    tags.tag(value, Axis(dim))
                    return

    def _new(self, value: Tensor) -> bool:
        """Whether this is where examples begin; what the closure made on the way counts as an
        input of the model (a slice of the batch), but not as one of a part of it (positions).
        """
        tags = self._tags
        return not tags.seen(value) if tags.layout.deep else tags.get(value) is None

    def _begin_packed(self, value: PackedSequence) -> None:
        count = int(value.batch_sizes[0])
        tags = self._tags
        if tags.found(count) and self._new(value.data):
            order = value.sorted_indices
            order = torch.arange(count, device="cpu") if order is None else order
            owners = [order[:k].cpu() for k in value.batch_sizes.tolist()]
            tags.tag(value.data, axis_from(0, torch.cat(owners), count))
