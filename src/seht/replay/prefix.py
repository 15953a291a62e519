"""Everything before the first drawn weight, computed and differentiated once.

The prefix is the same in every pass: the centre keeps the results of its calls, and the perturbed
passes return them as leaves of their own graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from seht.operators.operator import IN_PLACE
from seht.tensors.memory import root_of, version
from seht.tensors.trees import StandIns, copies, stand_in, tensors


class Prefix:
    """The calls before the first drawn weight, with the results that the centre computed."""

    def __init__(self, drawn: set[int]) -> None:
        self._drawn = drawn
        self.calls: list[tuple[Any, Any, bool]] = []
        """Function, result, and whether it ran in the forward of a custom ``Function``."""
        self.closed = False
        self.decisions = 0
        self.state: list[Tensor] = []
        self._spoilt = False
        self._versions: list[tuple[Tensor, int]] = []

    def open_to(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call still belongs to it."""
        return not self.closed and not self._sees((*args, *kwargs.values()))

    def keep(self, func: Any, args: Any, out: Any, *, hidden: bool) -> None:
        """Take in a call; ``hidden`` if it ran in the forward of a custom ``Function``."""
        if func in IN_PLACE and args and isinstance(args[0], Tensor):
            # A write is not done again. What a Function returned is made anew in each pass, and
            # a Function that writes into its input must really do so.
            root = root_of(args[0])
            seen = any(root is t for _, out, inner in self.calls if not inner for t in tensors(out))
            self._spoilt |= root.requires_grad and (hidden or not seen)
        self.calls.append((func, out, hidden))

    def close(self, decisions: int, state: list[Tensor]) -> None:
        """A drawn weight was seen."""
        self.closed, self.decisions, self.state = True, decisions, state
        self._versions = [(out, version(out)) for out in self.results()]

    def spoil(self) -> None:
        """Give up: it cannot be replayed after all."""
        self._spoilt = True

    def results(self) -> Iterator[Tensor]:
        """Every tensor that a call of the prefix returned."""
        for _, out, _ in self.calls:
            yield from tensors(out)

    def intact(self) -> bool:
        """Whether it can be replayed: a drawn weight came, and its results were not changed."""
        return (
            self.closed
            and not self._spoilt
            and all(version(t) == known for t, known in self._versions)
        )

    def again(self, place: int, stand_ins: StandIns) -> Any:
        """The result of a call, for another pass."""
        _, out, hidden = self.calls[place]
        # The forward of a Function must return a tensor of its own, or it would claim ours.
        return copies(out) if hidden else stand_in(out, stand_ins)

    def _sees(self, values: Any) -> bool:
        return any(
            id(v) in self._drawn if isinstance(v, Tensor) else
            isinstance(v, (tuple, list)) and self._sees(v)
            for v in values
        )  # fmt: skip
