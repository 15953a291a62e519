"""Functions that put entries elsewhere, and those that put tensors together: the examples move with
the entries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.arithmetic import additive, copied
from seht.operators.axes import Axis, Broken, Call, Tag, axis_from, compressed, couples, spread
from seht.operators.operator import Operator, jointly, named
from seht.operators.rules import depends, refused
from seht.tensors.trees import tensors

_VF = torch._C._VariableFunctions
_T: Any = torch.Tensor


def moved(call: Call) -> list[Tag | None]:
    """Functions that put entries elsewhere: asked where they put the entries' owners."""
    _, axis = call.main()
    assert isinstance(axis, Axis)
    owners = spread(call.main()[0].shape, axis, call.n)
    try:
        out = _instead(call, owners)
    except RuntimeError:  # a view of what has no memory of its own
        out = _instead(call, owners.contiguous())
    found = [compressed(part, call.n) for part in tensors(out)]
    return [Broken(f"{call.name} {t.reason}") if isinstance(t, Broken) else t for t in found]


def _instead(call: Call, owners: Tensor) -> Any:
    """The same call on the owners of the entries."""
    x = call.main()[0]
    args = [owners if a is x and not k else a for k, a in enumerate(call.args)]
    return call.func(*args, **{k: owners if v is x else v for k, v in call.kwargs.items()})


def indexed(call: Call) -> Tag | None:
    """Indexing: the owners of the entries go where the entries go."""
    _, axis = call.main()
    if not isinstance(axis, Axis):
        if axis is None:  # what all share, looked up by the examples' own indices
            return next((t for t in call.tags if isinstance(t, Broken)), None) or _looked_up(call)
        return axis
    return _nothing(call, axis) if call.out.numel() == 0 else moved(call)[0]


def _nothing(call: Call, axis: Axis) -> Tag:
    """No entry is left, so none is anybody's: an expert that got no token in this step."""
    shape, before = call.out.shape, call.main()[0].shape
    if len(shape) == len(before) and shape[axis.dim] == before[axis.dim]:
        return axis  # h[:, :0]
    return Axis(list(shape).index(0), 1, ())


def _looked_up(call: Call) -> Tag | None:
    """table[ids], with one index tensor that belongs to the examples."""
    index = call.args[1] if len(call.args) > 1 else None
    mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    if isinstance(call.tag(index), Axis) and not mask:
        return call.tag(index)
    return couples(call) if any(isinstance(t, Axis) for t in call.tags) else None


def joined(call: Call) -> Tag | None:
    """cat: along the examples it puts them in a row, else they stay where they are."""
    rank = call.out.dim()
    dim = call.argument(1, "dim", 0) % rank
    found: Axis | None = None
    for tag in call.tags:
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


def stacked(call: Call) -> Tag | None:
    """stack: a new dimension before or after the examples."""
    found: Tag | None = None
    for tag in call.tags:
        if tag is not None and found is not None and tag != found:
            return couples(call)
        found = tag if tag is not None else found
    if not isinstance(found, Axis):
        return found
    dim = call.argument(1, "dim", 0) % call.out.dim()
    return found.at(found.dim + (dim <= found.dim))


# --- packed sequences -----------------------------------------------------------------------------


def packed(call: Call) -> Tag | None:
    """(data, batch_sizes): step by step the sequences that are still running."""
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        return axis
    first = bool(call.argument(2, "batch_first", False))
    if axis.dim != (0 if first else 1):
        return couples(call)
    owners = axis.owners(call.given[0].shape[axis.dim], call.n)
    return axis_from(0, torch.cat([owners[:k] for k in call.out[1].tolist()]), call.n)


def unpacked(call: Call) -> Tag | None:
    """(padded, lengths): the sequences side by side again."""
    axis = call.tags[0]
    if not isinstance(axis, Axis):
        return axis
    first = bool(call.argument(2, "batch_first", False))
    alive = int(call.argument(1, "batch_sizes")[0])  # the first step has all of them
    owners = axis.owners(call.given[0].shape[0], call.n)[:alive]
    return axis_from(0 if first else 1, owners, call.n)


# --- the rows ------------------------------------------------------------------------------------


def _extreme(*args: Any, reduce: Any = None, **_: Any) -> bool:
    found = [a for a in (*args, reduce) if isinstance(a, str)]
    return not found or found[0] in ("amax", "amin", "max", "min")


# F.unfold pads and takes no whole numbers, unlike the method of that name.
_VIEWS = named("""
    view reshape squeeze unsqueeze flatten unflatten select transpose permute t expand movedim
    moveaxis swapaxes swapdims narrow split chunk unbind tensor_split view_as reshape_as
    expand_as repeat tile repeat_interleave flip roll adjoint ravel unfold diagonal tril triu
    squeeze_ unsqueeze_ transpose_ t_ hsplit vsplit split_with_sizes unsafe_chunk unsafe_split
    atleast_2d atleast_3d matrix_transpose
""", F.unfold)  # fmt: skip

OPERATORS = (
    Operator((*_VIEWS, _T.T.__get__, _T.mT.__get__), affine=jointly, moves=True),
    Operator("clone contiguous", axes=additive, affine=jointly, moves=True),
    Operator("__getitem__", axes=indexed, affine=jointly, moves=True),
    Operator("index_select", axes=indexed, affine=jointly, by_content=True),
    Operator("gather", affine=jointly, moves=True, by_content=True),
    Operator("take take_along_dim masked_select", moves=True, by_content=True),
    Operator("""
        scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy index_copy_
        index_fill index_fill_ index_put index_put_ put put_ masked_scatter masked_scatter_
        __setitem__
    """, by_content=True),
    Operator(
        "scatter_reduce scatter_reduce_ index_reduce index_reduce_ segment_reduce",
        refused("with a maximum or minimum has kinks", _extreme),
        by_content=True,
    ),
    Operator("copy_", axes=copied),
    Operator("pad interpolate pixel_shuffle pixel_unshuffle", affine=jointly),
    Operator(
        "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d",
        refused("has kinks in its grid", lambda _, grid, *__, **___: depends((grid,), {})),
    ),
    Operator("cat concat concatenate", axes=joined, affine=jointly, adds=True),
    Operator("stack", axes=stacked, affine=jointly, adds=True),
    Operator((_VF._pack_padded_sequence,), axes=packed),
    Operator((_VF._pad_packed_sequence,), axes=unpacked),
)  # fmt: skip
