"""What depends on the inputs of a custom ``autograd.Function``, in its forward.

Nothing in there requires a gradient, so that a decision on an intermediate result looks like one on
a constant. Such results are followed by hand, from the inputs on, which do require one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from seht.operators.rules import depends
from seht.tensors.trees import tensors


@dataclass
class Intermediates:
    """The intermediate results that are still alive."""

    _known: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)

    def holds(self, args: Any, kwargs: Any) -> bool:
        """Whether one of them is among the arguments."""
        return any(self._is_known(tensor) for tensor in tensors((args, tuple(kwargs.values()))))

    def follow(self, args: Any, kwargs: Any, out: Any) -> Any:
        """Remember what an operation made of its arguments, where those depend on the inputs."""
        if depends(args, kwargs) or self.holds(args, kwargs):
            for tensor in tensors(out):
                self._known[id(tensor)] = weakref.ref(tensor)
        return out

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor
