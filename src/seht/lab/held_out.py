"""The validation split as held-out data for a weight that is tuned on it; never the test set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from seht.lab.data import Data
from seht.lab.methods.base import Batch


class ValidationBatches:
    """Batches of the validation split, of the size that is trained on, in their fixed order."""

    def __init__(self, data: Data, size: int) -> None:
        self._data, self._size = data, size

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._data.eval_batches("valid"):
            if not batch.x.is_floating_point():  # text is cut as it is trained on
                yield batch
                continue
            parts = zip(batch.x.split(self._size), batch.y.split(self._size), strict=True)
            yield from (replace(batch, x=x, y=y) for x, y in parts)
