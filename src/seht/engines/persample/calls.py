"""A call that was made while the examples are followed, and what a rule answers to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from seht.engines.persample.axes import Broken, Tag


class Call(NamedTuple):
    """One call that was made, with the tags of its tensors."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    given: list[Tensor]
    tags: list[Tag | None]
    out: Any
    n: int

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default

    @property
    def name(self) -> str:
        """What to call the function in a message."""
        return getattr(self.func, "__name__", str(self.func))


Follow = Callable[[Call], Tag | None]


def couples(call: Call) -> Broken:
    """The examples meet in this call."""
    return Broken(f"{call.name} mixes examples")
