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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seht.operators import spellings
from seht.operators.axes.table import MOVEMENT
from seht.task import Closure
from seht.tensors.trees import tensors

Depends: TypeAlias = frozenset[int] | None
"""The identities of the tensors it is affine in, of all it depends on; None where it is not."""
NOTHING: frozenset[int] = frozenset()
_ENDS = frozenset((-1,))
"""No longer affine, by this very call."""


class NotAffine(Exception):
    """The identity does not hold, or nobody knows."""


class Affine(TorchFunctionMode):
    """Follows one pass of a closure."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(w): w for w in weights}
        self._tags: dict[int, tuple[weakref.ref[Tensor], int, Depends]] = {}
        self._lost = False
        """Somebody may write where no version counter sees it."""
        self._asked = False
        self.raised: BaseException | None = None
        """What came out of the closure itself."""

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
        rule = _RULES.get(func)
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


Rule: TypeAlias = Callable[[list[frozenset[int]], Any, dict[str, Any]], Depends]


def _sum(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Affine in all its arguments together."""
    return NOTHING.union(*given)


def _product(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Affine in each argument: a tensor that is in two of them would be there squared."""
    together = NOTHING.union(*given)
    return together if len(together) == sum(map(len, given)) else None


def _quotient(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Affine in the first argument alone."""
    rounded = kwargs.get("rounding_mode") is not None
    return None if rounded or any(given[1:]) else given[0]


def _batch_norm(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """With stored statistics a scale and a shift."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    stored = bound.get("running_mean") is not None and not bound.get("training", False)
    return _product(given, args, kwargs) if stored else None


def _embedding(given: list[frozenset[int]], args: Any, kwargs: dict[str, Any]) -> Depends:
    """Picks rows, unless it shortens them first."""
    names = ("input", "weight", "padding_idx", "max_norm")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    return _sum(given, args, kwargs) if bound.get("max_norm") is None else None


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(MOVEMENT, _sum),
    **dict.fromkeys(
        spellings("""
            add add_ sub sub_ subtract rsub neg negative __add__ __radd__ __sub__ __rsub__ __neg__
            __iadd__ __isub__ cat concat concatenate stack sum mean cumsum where masked_fill
            float double to type_as index_select gather pad interpolate pixel_shuffle
            pixel_unshuffle avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
            adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_max_pool1d
            adaptive_max_pool2d adaptive_max_pool3d relu relu_ relu6 relu6_ leaky_relu leaky_relu_
            hardtanh hardtanh_ threshold threshold_ abs clamp clamp_ clamp_min clamp_max maximum
            minimum dropout dropout_ dropout1d dropout2d dropout3d feature_dropout
        """),
        _sum,
    ),
    **dict.fromkeys(
        spellings("""
            mul mul_ multiply __mul__ __rmul__ __imul__ matmul mm bmm __matmul__ addmm baddbmm
            linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
            einsum prelu
        """),
        _product,
    ),
    **dict.fromkeys(spellings("div div_ divide true_divide __truediv__ __itruediv__"), _quotient),
    **dict.fromkeys(spellings("batch_norm"), _batch_norm),
    **dict.fromkeys(spellings("embedding"), _embedding),
}
