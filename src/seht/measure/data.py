"""The data to measure on: one batch, a data set or any iterable of batches, in micro-batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from seht.errors import check_count
from seht.tensors.trees import is_batch, mapped, tensors

MICRO_BATCH = 128
"""Examples per micro-batch, where we are the ones to cut."""


class Batches:
    """The data as micro-batches that can be read again and again.

    A tensor, or a tuple, list, mapping or dataclass that holds tensors, is *one* batch; a
    ``torch.utils.data.Dataset`` is cut into batches; everything else is iterated over, and what
    comes out are the batches. An iterator that can be read only once is kept in memory when it has
    to be read again.

    Args:
        data: see above.
        size: examples per micro-batch; given batches are cut only if it is given, data sets
            into 128 by default.
        axis: the examples' axis in the tensors of a batch.
        limit: read so many examples and no more.
        device: tensors are moved there.
        again: whether the data will be read more than once.
    """

    def __init__(
        self,
        data: Any,
        *,
        size: int | None = None,
        axis: int = 0,
        limit: int | None = None,
        device: torch.device | None = None,
        again: bool = False,
    ) -> None:
        check_count("micro_batch", size, optional=True)
        check_count("limit", limit, optional=True)
        self._size, self._axis, self._limit, self._device = size, axis, limit, device
        self.partial = False
        """Whether the last reading left something out, because of ``limit``."""
        self._source: Iterable[Any]
        if is_batch(data):
            self._source = [data]
        elif isinstance(data, Dataset):
            self._source = DataLoader(data, batch_size=size or MICRO_BATCH)
        elif isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
            self._source = data
        else:
            raise TypeError(
                f"data must be a batch (tensors in a tuple, list or dictionary), a data set or an "
                f"iterable of batches, not {type(data).__name__}"
            )
        self._kept: list[tuple[Any, int]] | None = None
        self._keep = again and reads_once(self._source)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """``(micro-batch, number of its examples)``, one after the other."""
        if self._keep and self._kept is None:
            self._kept = list(self._cut())
        return self._cut() if self._kept is None else iter(self._kept)

    def whole(self) -> Batches:
        """The batches without cuts."""
        found = copy.copy(self)
        found._size = None
        return found

    @property
    def total(self) -> int | None:
        """How many micro-batches, where that is known."""
        if self._kept is not None:
            return len(self._kept)
        if self._size is None and self._limit is None and isinstance(self._source, Sized):
            try:
                return len(self._source)
            except TypeError:  # a loader of an iterable data set has a length in name only
                return None
        return None

    def _cut(self) -> Iterator[tuple[Any, int]]:
        self.partial = False
        left = self._limit
        for batch in self._source:
            if left == 0:
                self.partial = True
                return
            count = size_of(batch, self._axis)
            if count == 0:
                continue
            if self._device is not None:
                batch = moved(batch, self._device)
            take = count if left is None else min(count, left)
            step = take if self._size is None else self._size
            for start in range(0, take, step):
                stop = min(start + step, take)
                whole = start == 0 and stop == count
                part = batch if whole else cut(batch, self._axis, count, start, stop)
                yield part, stop - start
            if left is not None:
                left -= take
                self.partial = take < count


def size_of(batch: Any, axis: int = 0) -> int:
    """How many examples a batch has: the length of its first tensor along the axis."""
    for tensor in tensors(batch):
        if tensor.dim() > axis:
            return tensor.shape[axis]
    raise ValueError(
        f"cannot tell how many examples a batch has: it is {type(batch).__name__} and holds no "
        f"tensor with an axis {axis}; batches are tensors in tuples, lists, dictionaries or "
        "dataclasses (batch_dim= names the examples' axis)"
    )


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; itself if they are there."""
    if all(tensor.device == device for tensor in tensors(batch)):
        return batch
    return mapped(batch, lambda tensor: tensor.to(device))


def cut(batch: Any, axis: int, count: int, start: int, stop: int) -> Any:
    """Some of a batch's examples; tensors without such an axis stay whole."""

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() > axis and tensor.shape[axis] == count:
            return tensor.narrow(axis, start, stop - start)
        return tensor

    return mapped(batch, part)


def reads_once(data: Any) -> bool:
    """Whether the data is an iterator, gone after one reading."""
    return hasattr(data, "__next__")


def kept(data: Any) -> Any:
    """The data as something that can be read again; a list of tensors would be one batch."""
    return deque(data) if reads_once(data) else data
