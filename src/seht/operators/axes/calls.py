"""A call that was made while the examples are followed, and what a rule answers to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from seht.operators.axes.axes import Broken, Sum, Tag

_ALSO = {"dim": "axis", "input": "x", "other": "x2"}
"""NumPy's names for arguments, which PyTorch's own functions take as well."""


class Call(NamedTuple):
    """One call that was made, with the tags of its tensors."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    given: list[Tensor]
    tags: list[Tag | None]
    out: Any
    n: int
    hidden: bool = False
    """In the forward of a custom Function, where what varies looks constant."""

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        for known in (name, _ALSO.get(name)):
            if known in self.kwargs:
                return self.kwargs[known]
        return self.args[place] if len(self.args) > place else default

    def main(self) -> tuple[Tensor, Tag | None]:
        """The tensor that the function works on, and its tag."""
        tensor = self.argument(0, "input", self.kwargs.get("self"))
        if not isinstance(tensor, Tensor):
            tensor = self.given[0]
        return tensor, self.tag(tensor)

    def tag(self, value: Any) -> Tag | None:
        """The tag of an argument."""
        for tensor, tag in zip(self.given, self.tags, strict=True):
            if tensor is value:
                return tag
        return None

    def beside(self, *values: Any) -> list[Tag]:
        """The tags of all other tensors that depend on a weight, where they have one."""
        mine = {id(value) for value in values}
        return [
            tag
            for tensor, tag in zip(self.given, self.tags, strict=True)
            if tag is not None and id(tensor) not in mine and self.varies(tensor)
        ]

    def varies(self, tensor: Tensor) -> bool:
        """Whether a tensor may depend on a weight: a constant couples nothing."""
        return self.hidden or tensor.requires_grad

    @property
    def name(self) -> str:
        """What to call the function in a message."""
        return getattr(self.func, "__name__", str(self.func))


Follow = Callable[[Call], Tag | None]


def couples(call: Call) -> Broken:
    """The examples meet in this call."""
    return Broken(f"{call.name} mixes examples")


def bends(call: Call, total: Sum) -> Broken:
    """The call is not linear in a sum over the examples."""
    return Broken(f"{total.by} adds examples up before {call.name}, which is not linear in the sum")
