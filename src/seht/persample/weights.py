"""The probed weights, seen whole or through views, and how a closure uses them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from seht.operators.rules import called
from seht.operators.table import MOVEMENT


class Part(NamedTuple):
    """A probed weight or a view of it: the calls that lead from the one to the other."""

    name: str
    path: tuple[tuple[Any, Any, Any, int | None], ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The same view of another tensor of the weight's shape."""
        for func, args, kwargs, place in self.path:
            tensor = func(tensor, *args, **kwargs)
            tensor = tensor if place is None else tensor[place]
        return tensor


class ProbedWeights:
    """Which of them have a direction for each example, and which keep one for all."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.shared: dict[str, str] = {}
        """Weights that keep one direction for all examples, and why."""
        self.varied: set[str] = set()
        """Weights with a use that has a per-sample form."""
        self._names = {id(w): name for name, w in weights.items()}
        self._by_name = weights
        self._parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}

    def moving(self) -> set[str]:
        """The weights with a direction for each example."""
        return self.varied - self.shared.keys()

    def part(self, tensor: Any) -> Part | None:
        """The probed weight that a tensor is, or is a view of."""
        if not isinstance(tensor, Tensor):
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            return Part(name)
        entry = self._parts.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def probed(self, *tensors: Any) -> bool:
        """Whether one of them is a probed weight, or a view of one."""
        return any(self.part(tensor) is not None for tensor in tensors)

    def meets(self, tags: Any, *tensors: Tensor | None) -> bool:
        """Whether one of a layer's weights is probed, and none of them made by the examples."""
        made = any(t is not None and tags.get(t) is not None for t in tensors)
        return self.probed(*tensors) and not made

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def share(self, part: Part | None, why: str) -> None:
        """A use without a per-sample form: one direction for all examples, in all uses."""
        if part is not None:
            self.shared.setdefault(part.name, why)

    def share_all(self, why: str) -> None:
        """One direction for all examples, everywhere."""
        self.shared.update(dict.fromkeys(self._names.values(), why))

    def follow(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], outs: Any, *, hidden: bool
    ) -> None:
        """A call that is given weights: either a view of one, or a use without a rule.

        What is constant to autograd is no use, unless it is ``hidden`` from it (in the forward of
        a custom Function).
        """
        for tensor in given:
            part = self.part(tensor)
            if part is None or all(o is tensor for o in outs):
                continue
            if not hidden and not any(o.requires_grad for o in outs):
                continue
            if func in MOVEMENT and len(given) == 1 and args and args[0] is tensor:
                single = len(outs) == 1 and not isinstance(outs, tuple)
                for place, out in enumerate(outs):
                    step = (func, args[1:], kwargs, None if single else place)
                    self._parts[id(out)] = (
                        weakref.ref(out),
                        Part(part.name, (*part.path, step)),
                    )
            else:
                self.share(part, f"used by {called(func)}")
