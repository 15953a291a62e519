"""Buffers (BatchNorm statistics, counters, averages) move once per step, or not at all."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn


class BorrowedBuffers:
    """While the block runs, the modules hold clones of their buffers; afterwards the originals.

    Nothing is written into an original while a pass runs, so that a failure leaves the model as it
    was, a pending backward finds the values it saved, and several passes can start from the same
    values. What a pass wrote is taken over by :meth:`commit`, once it is known to be wanted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._loans: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor, int]] = []
        self._written: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor | None]] = []

    def __enter__(self) -> BorrowedBuffers:
        clones: dict[int, Tensor] = {}
        for module in self._model.modules():
            for name, original in module._buffers.items():
                if original is not None:
                    if id(original) not in clones:
                        clones[id(original)] = original.clone()
                    clone = clones[id(original)]
                    self._loans.append((module._buffers, name, original, clone, clone._version))
        for holder, name, _, clone, _ in self._loans:
            holder[name] = clone
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for holder, name, original, clone, version in self._loans:
            current = holder.get(name)
            holder[name] = original
            # Fused kernels write statistics past the version counter.
            if current is not clone or clone._version != version or clone.is_floating_point():
                self._written.append((holder, name, original, current))
        self._loans = [(*loan[:4], -1) for loan in self._loans]

    def clones(self) -> set[int]:
        """The identities of what the modules hold while the block runs."""
        return {id(clone) for _, _, _, clone, _ in self._loans}

    def commit(self) -> None:
        """Take over what the pass wrote: in place, or as a new tensor where it assigned one."""
        clones = {id(clone) for _, _, _, clone, _ in self._loans}
        for holder, name, original, current in self._written:
            if current is not None and id(current) in clones:
                original.data.copy_(current)
            else:
                holder[name] = current
        self._written.clear()
        self._loans.clear()
