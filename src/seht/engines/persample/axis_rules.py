"""Which function carries the example axis how.

Tables tell it for elementwise functions, reductions, losses, and for whatever only puts entries
elsewhere. Any other function is asked by experiment: where the inputs of some examples change,
which entries of the output do? If those of other examples do too, the function couples examples.
Answers are kept by shapes and arguments, so that the experiment is made on the first step only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.engines.kinks import spellings
from seht.engines.persample.axes import (
    SUM,
    Axis,
    Broken,
    Tag,
    axis_from,
    compressed,
    every_tensor,
    spread,
)


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


# --- elementwise ----------------------------------------------------------------------------------


def _elementwise(call: Call) -> Tag | None:
    """One axis for all arguments, aligned from the right as broadcasting does."""
    found: Axis | None = None
    rank = call.out.dim()
    for tensor, tag in zip(call.given, call.tags, strict=True):
        if not isinstance(tag, Axis):
            if tag is not None:
                return tag if isinstance(tag, Broken) else couples(call)
            continue
        aligned = tag.at(tag.dim + rank - tensor.dim())
        if found is not None and found != aligned:
            return couples(call)
        found = aligned
    return found


def _additive(call: Call) -> Tag | None:
    """A sum of sums is one; a sum over examples added to an example couples them."""
    if any(tag is SUM for tag in call.tags):
        return SUM if all(tag is SUM or tag is None for tag in call.tags) else couples(call)
    return _elementwise(call)


def _scaled(call: Call) -> Tag | None:
    """A sum over examples may be multiplied by what all examples share."""
    sums = [place for place, tag in enumerate(call.tags) if tag is SUM]
    if not sums:
        return _elementwise(call)
    shared = all(tag is SUM or tag is None for tag in call.tags)
    return SUM if shared and len(sums) == 1 else couples(call)


def _divided(call: Call) -> Tag | None:
    if len(call.tags) > 1 and call.tags[1] is SUM:
        return couples(call)
    return _scaled(call)


# --- reductions -----------------------------------------------------------------------------------


def _reduced(call: Call) -> Tag | None:
    """Sum and mean along dimensions; over the examples they give a sum over them."""
    axis, x = call.tags[0], call.given[0]
    if not isinstance(axis, Axis):
        return axis
    dims = call.argument(1, "dim", call.kwargs.get("axis"))
    if isinstance(dims, torch.dtype) or dims is None or dims == ():
        return SUM
    gone = {d % x.dim() for d in ((dims,) if isinstance(dims, int) else tuple(dims))}
    if axis.dim in gone:
        return SUM
    kept = call.out.dim() == x.dim()
    return axis if kept else axis.at(axis.dim - sum(d < axis.dim for d in gone))


def _loss(classes: bool, *, at: int) -> Follow:
    """A loss function; ``at`` is the place of the argument ``reduction``."""

    def follow(call: Call) -> Tag | None:
        axis = call.tags[0]
        if not isinstance(axis, Axis):
            return axis if len(call.tags) < 2 or axis is not None else call.tags[1]
        x = call.given[0]
        column = (1 if x.dim() > 1 else 0) if classes else -1
        if axis.dim == column:
            return couples(call)
        if call.argument(at, "reduction", "mean") != "none":
            return SUM
        if classes:
            return axis.at(axis.dim - (axis.dim > column))
        return _elementwise(call)

    return follow


# --- places ---------------------------------------------------------------------------------------


def moved(call: Call) -> list[Tag | None]:
    """Functions that put entries elsewhere: asked where they put the entries' owners."""
    axis = call.tags[0]
    assert isinstance(axis, Axis)
    owners = spread(call.given[0].shape, axis, call.n)
    rest = call.args[1:], call.kwargs
    try:
        out = call.func(owners, *rest[0], **rest[1])
    except RuntimeError:  # a view of what has no memory of its own
        out = call.func(owners.contiguous(), *rest[0], **rest[1])
    found = [compressed(part, call.n) for part in every_tensor(out)]
    return [Broken(f"{call.name} {t.reason}") if isinstance(t, Broken) else t for t in found]


def _moved(call: Call) -> Tag | None:
    """Indexing: the owners of the entries go where the entries go."""
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        if axis is None:  # what all share, looked up by the examples' own indices
            return next((t for t in call.tags if isinstance(t, Broken)), None) or _looked_up(call)
        return axis
    return Broken(f"{call.name} leaves nothing") if call.out.numel() == 0 else moved(call)[0]


def _looked_up(call: Call) -> Tag | None:
    """table[ids], with one index tensor that belongs to the examples."""
    index = call.args[1] if len(call.args) > 1 else None
    if isinstance(index, Tensor) and len(call.tags) > 1 and isinstance(call.tags[1], Axis):
        return call.tags[1]
    return couples(call) if any(isinstance(t, Axis) for t in call.tags) else None


def _joined(call: Call) -> Tag | None:
    """cat: along the examples it puts them in a row, else they stay where they are."""
    rank = call.out.dim()
    dim = call.argument(1, "dim", 0) % rank
    found: Axis | None = None
    for tag in call.tags:
        if tag is SUM:
            return SUM if all(t is SUM or t is None for t in call.tags) else couples(call)
        if isinstance(tag, Broken):
            return tag
        if isinstance(tag, Axis) and tag.dim != dim:
            if found is not None and found != tag:
                return couples(call)
            found = tag
    along = [isinstance(tag, Axis) and tag.dim == dim for tag in call.tags]
    if not any(along):
        return found
    if found is not None or not all(along):
        return Broken(f"{call.name} puts what is no example beside the examples")
    owners = [
        tag.owners(x.shape[dim], call.n)
        for x, tag in zip(call.given, call.tags, strict=True)
        if isinstance(tag, Axis)
    ]
    return axis_from(dim, torch.cat(owners), call.n)


def _stacked(call: Call) -> Tag | None:
    found: Tag | None = None
    for tag in call.tags:
        if tag is not None and found is not None and tag != found:
            return couples(call)
        found = tag if tag is not None else found
    if not isinstance(found, Axis):
        return found
    dim = call.argument(1, "dim", 0) % call.out.dim()
    return found.at(found.dim + (dim <= found.dim))


def _normed(call: Call) -> Tag | None:
    """Batch norm; in train mode every example changes the statistics of all."""
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        return axis
    if call.argument(5, "training", False) or call.argument(1, "running_mean") is None:
        return Broken(
            "BatchNorm in train mode makes every example depend on all others (put it in eval "
            "mode, use GroupNorm or LayerNorm, or opt in with coupling='own' or "
            "coupling='frozen', which estimate something else)"
        )
    return couples(call) if axis.dim == 1 else axis


def _within(features: Callable[[Call], set[int]]) -> Follow:
    """Functions that work along some dimensions of each example and leave the others alone."""

    def follow(call: Call) -> Tag | None:
        axis = call.tags[0]
        if not isinstance(axis, Axis):
            return couples(call) if axis is SUM else axis
        return couples(call) if axis.dim in features(call) else axis

    return follow


def _along(call: Call) -> set[int]:
    dim = call.argument(1, "dim")
    rank = call.given[0].dim()
    return {dim % rank} if isinstance(dim, int) else set(range(rank))


def _trailing(call: Call) -> set[int]:
    rank = call.given[0].dim()
    return set(range(rank - len(call.argument(1, "normalized_shape")), rank))


def _all_but_first(call: Call) -> set[int]:
    return set(range(1, call.given[0].dim()))


def _spatial(count: int) -> Callable[[Call], set[int]]:
    def features(call: Call) -> set[int]:
        rank = call.given[0].dim()
        return set(range(max(0, rank - count), rank))

    return features


# --- packed sequences -----------------------------------------------------------------------------


def _packed(call: Call) -> Tag | None:
    """(data, batch_sizes): step by step the sequences that are still running."""
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        return axis
    first = bool(call.argument(2, "batch_first", False))
    if axis.dim != (0 if first else 1):
        return couples(call)
    owners = axis.owners(call.given[0].shape[axis.dim], call.n)
    return axis_from(0, torch.cat([owners[:k] for k in call.out[1].tolist()]), call.n)


def _unpacked(call: Call) -> Tag | None:
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        return axis
    first = bool(call.argument(2, "batch_first", False))
    alive = int(call.argument(1, "batch_sizes")[0])  # the first step has all of them
    owners = axis.owners(call.given[0].shape[0], call.n)[:alive]
    return axis_from(0 if first else 1, owners, call.n)


_VF = torch._C._VariableFunctions

AXES: dict[Any, Follow] = {
    **dict.fromkeys(
        spellings("""
            relu relu_ relu6 relu6_ leaky_relu leaky_relu_ elu elu_ selu selu_ celu celu_ gelu silu
            mish hardswish hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ softplus
            sigmoid sigmoid_ tanh tanh_ logsigmoid tanhshrink softshrink hardshrink threshold
            threshold_ exp exp_ expm1 log log1p log2 log10 sqrt sqrt_ rsqrt square sin cos tan
            erf erfc abs abs_ sign reciprocal pow pow_ __pow__ __rpow__ clamp clamp_ clip clip_
            clamp_min clamp_max maximum minimum fmax fmin where lerp addcdiv dropout
            dropout_ alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d
            feature_dropout masked_fill masked_fill_ nan_to_num atan2 xlogy logaddexp hypot
            detach clone contiguous float double half bfloat16 to type type_as requires_grad_ cpu
            gt ge lt le eq ne __gt__ __ge__ __lt__ __le__ __eq__ __ne__ logical_not logical_and
            logical_or isnan isinf isfinite long int bool round floor ceil trunc
            zeros_like ones_like empty_like full_like rand_like randn_like
            smooth_l1 softsign rrelu
        """),
        _elementwise,
    ),
    torch.Tensor.data.__get__: _elementwise,  # type: ignore[attr-defined]
    **dict.fromkeys(
        spellings("""
            add add_ sub sub_ subtract rsub neg negative __radd__ __rsub__ __add__ __sub__ __neg__
            __iadd__ __isub__
        """),
        _additive,
    ),
    **dict.fromkeys(
        spellings("mul mul_ multiply __mul__ __rmul__ __imul__ addcmul addcmul_"), _scaled
    ),
    **dict.fromkeys(
        spellings("div div_ divide true_divide __truediv__ __rdiv__ __itruediv__ __div__"),
        _divided,
    ),
    **dict.fromkeys(spellings("sum mean nansum"), _reduced),
    F.cross_entropy: _loss(True, at=6),
    F.nll_loss: _loss(True, at=6),
    F.mse_loss: _loss(False, at=4),
    F.binary_cross_entropy: _loss(False, at=5),
    F.binary_cross_entropy_with_logits: _loss(False, at=5),
    F.kl_div: _loss(False, at=4),
    F.poisson_nll_loss: _loss(False, at=7),
    **dict.fromkeys(spellings("__getitem__ index_select"), _moved),
    **dict.fromkeys(spellings("cat concat concatenate"), _joined),
    **dict.fromkeys(spellings("stack"), _stacked),
    **dict.fromkeys(spellings("batch_norm"), _normed),
    **dict.fromkeys(spellings("group_norm"), _within(_all_but_first)),
    **dict.fromkeys(spellings("layer_norm rms_norm"), _within(_trailing)),
    **dict.fromkeys(spellings("softmax log_softmax softmin"), _within(_along)),
    **{
        f: _within(_spatial(k))
        for k in (1, 2, 3)
        for f in spellings(
            f"max_pool{k}d avg_pool{k}d adaptive_max_pool{k}d adaptive_avg_pool{k}d lp_pool{k}d"
        )
    },
    _VF._pack_padded_sequence: _packed,
    _VF._pad_packed_sequence: _unpacked,
}

LINEAR = frozenset(
    spellings("""
        sum mean nansum view reshape squeeze unsqueeze flatten unflatten __getitem__ select
        transpose permute t expand float double to clone contiguous cat stack movedim unbind
        split chunk view_as reshape_as
    """)
)
"""Functions under which a sum over examples stays one."""

MOVEMENT = frozenset(
    [
        *spellings("""
            view reshape squeeze unsqueeze flatten unflatten select transpose permute t expand
            movedim moveaxis swapaxes swapdims narrow split chunk unbind tensor_split view_as
            reshape_as expand_as repeat tile repeat_interleave flip roll adjoint ravel contiguous
            clone unfold diagonal tril triu __getitem__ squeeze_ unsqueeze_ transpose_ t_ hsplit
            vsplit split_with_sizes unsafe_chunk unsafe_split atleast_2d atleast_3d matrix_transpose
        """),
        torch.Tensor.T.__get__,  # type: ignore[attr-defined]
        torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    ]
)
"""Functions that put entries elsewhere and change none."""
