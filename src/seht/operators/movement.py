"""Functions that put entries elsewhere, and those that put tensors together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from seht.operators.axes.arithmetic import additive, copied
from seht.operators.axes.movement import indexed, joined, packed, stacked, unpacked
from seht.operators.operator import Operator, jointly, named
from seht.operators.rules import depends, refused

_VF = torch._C._VariableFunctions
_T: Any = torch.Tensor


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
