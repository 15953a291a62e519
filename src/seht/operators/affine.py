r"""Are the outputs affine in each probed tensor alone? Then the trace of H is that of G.

.. math:: H_{ll} = J_l^T H_{out} J_l + \sum_k \frac{\partial L}{\partial z_k}
          \frac{\partial^2 z_k}{\partial w_l^2}

The second term vanishes where z is affine in :math:`w_l` with all other tensors held: so it is in
every network of linear layers, ReLUs, pooling and norms that use stored statistics, kinks frozen.
Between *different* layers it does not, but a trace never asks for that. So
:math:`\mathrm{tr}(H) = \mathrm{tr}(G)`, and the Gauss-Newton probes cost half and vary less: they
have no mean-zero share :math:`s_l^T H_{lm} s_m` of the second term in them.

The centre pass is followed from call to call. Each tensor has the set of probed tensors that it
depends on, and it is affine in each; a sum joins such sets, a product may, if they have nothing in
common. Any other function ends it at once: not knowing is never wrong, only slower.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seht.operators.operator import NOTHING, Depends
from seht.operators.table import AFFINE
from seht.task import Closure
from seht.tensors.trees import tensors

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_ENDS = frozenset((-1,))
"""The result is not affine any more."""


class NotAffine(Exception):
    """The outputs are not affine, or not known to be."""


class Affine(TorchFunctionMode):
    """Follows one pass of a closure."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(w): w for w in weights}
        self._tags: dict[int, tuple[weakref.ref[Tensor], int, Depends]] = {}
        self._lost = False
        """Whether a write may have happened that no version counter shows."""
        self._asked = False
        self.raised: BaseException | None = None
        """The exception that the closure itself raised."""

    def around(self, closure: Closure) -> Closure:
        """The closure, followed in each run up to the question whether it :meth:`holds`: there may
        be several until the examples are found. The runs after it are replays.
        """

        def watched() -> Any:
            try:
                if not self._asked:
                    self._tags, self._lost = {}, False
                    with self:
                        return closure()
                return closure()
            except BaseException as error:
                self.raised = error
                raise

        return watched

    def holds(self, outputs: Sequence[Tensor]) -> bool:
        """Whether each of these is affine in every probed tensor."""
        self._asked = True
        return bool(outputs) and not self._lost and None not in map(self._of, outputs)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call, and note what its results depend on."""
        kwargs = kwargs or {}
        found = self._result(func, args, kwargs)  # before the call: it may write into its arguments
        out = func(*args, **kwargs)
        ends, found = found is _ENDS, None if found is _ENDS else found
        for tensor in tensors(out):
            if ends and tensor.requires_grad and not torch.compiler.is_compiling():
                self._lost = True  # the closure may catch it
                raise NotAffine  # now rather than at the end of a pass for nothing
            if found != NOTHING or tensor.requires_grad:
                self._tags[id(tensor)] = (weakref.ref(tensor), tensor._version, found)
        return out

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Depends:
        given = [self._of(tensor) for tensor in tensors((args, kwargs))]
        if all(tag == NOTHING for tag in given):
            return NOTHING
        if func in _GRADIENTS:  # of outputs that are cut off from the network, for G
            raise NotAffine
        if func == _DATA:  # a new object each time
            self._lost = True
        known = [tag for tag in given if tag is not None]
        if len(known) < len(given):
            return None
        rule = AFFINE.get(func)
        found = None if rule is None else rule(known, args, kwargs)
        return _ENDS if found is None else found

    def _of(self, tensor: Tensor) -> Depends:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return NOTHING  # a decision or an index: frozen
        if self._weights.get(id(tensor)) is tensor:
            return frozenset((id(tensor),))
        entry = self._tags.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            # Written to since, perhaps through another view: what is in it now is not known.
            return entry[2] if entry[1] == tensor._version else None
        return NOTHING if tensor.grad_fn is None else None
