"""Which rows of the outputs the logits of a cross-entropy are.

Between the model's outputs and ``log_softmax`` people shift, slice, permute, flatten and mask: the
rows move, the numbers of a row stay together. The nodes of the graph are followed from the outputs
on, with the places of the rows in a tensor whose class dimension has one entry, so that nothing of
the logits' size is made. Whatever is not in the table here ends the walk, and the loss goes the
general way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor come from."""

    places: Tensor
    """Their numbers in the outputs; of the tensor's shape, but for one entry in ``dim``."""
    dim: int
    """The dimension of the classes."""
    classes: int

    @classmethod
    def of(cls, shape: torch.Size, dim: int) -> Rows:
        """The rows of the outputs themselves, with the classes in that dimension."""
        kept = [1 if d == dim else size for d, size in enumerate(shape)]
        return cls(torch.arange(prod(kept), device="cpu").view(kept), dim, shape[dim])

    def moved(self, places: Tensor, dim: int | None = None) -> Rows:
        """The same rows in other places."""
        return Rows(places, self.dim if dim is None else dim, self.classes)


def in_rows(tensor: Tensor, dim: int) -> Tensor:
    """A tensor as a matrix with a row for each prediction, classes last; a view if possible."""
    if dim not in (-1, tensor.dim() - 1):
        tensor = tensor.movedim(dim, -1)
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def out_of_rows(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """The way back, to the shape of another tensor."""
    if dim in (-1, like.dim() - 1):
        return rows.view(like.shape)
    return rows.view(like.movedim(dim, -1).shape).movedim(-1, dim)


def follow(rows: Rows, path: list[tuple[Any, int]]) -> Rows | None:
    """The rows after some operations, the last of them first: nodes and which of their results.
    None where they do not stay together.
    """
    found: Rows | None = rows
    for node, port in reversed(path):
        rule = _RULES.get(node.name())
        found = None if found is None or rule is None else rule(found, node, port)
    return found


def signed(number: int) -> int:
    """Nodes show their numbers as unsigned ones."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _dim(number: int, rows: Rows) -> int:
    return signed(number) % rows.places.dim()


def _same(rows: Rows, node: Any, port: int) -> Rows | None:
    return rows


def _reshape(rows: Rows, node: Any, port: int) -> Rows | None:
    """Every number stays in order: the classes need a dimension of their own at the same place."""
    before, shape = prod(rows.places.shape[: rows.dim]), node._input_metadata[port].shape
    for dim, size in enumerate(shape):
        if size == rows.classes and prod(shape[:dim]) == before:
            kept = [1 if d == dim else size for d, size in enumerate(shape)]
            return rows.moved(rows.places.reshape(kept), dim)
    return None


def _slice(rows: Rows, node: Any, port: int) -> Rows | None:
    dim, step = _dim(node._saved_dim, rows), node._saved_step
    start, end = signed(node._saved_start), signed(node._saved_end)
    if dim == rows.dim:
        whole = range(rows.classes)[start:end:step] == range(rows.classes)
        return rows if whole else None
    index = [slice(None)] * dim + [slice(start, end, step)]
    return rows.moved(rows.places[tuple(index)])


def _select(rows: Rows, node: Any, port: int) -> Rows | None:
    return _taken(rows, _dim(node._saved_dim, rows), signed(node._saved_index))


def _unbind(rows: Rows, node: Any, port: int) -> Rows | None:
    return _taken(rows, _dim(node._saved_dim, rows), port)


def _taken(rows: Rows, dim: int, index: int) -> Rows | None:
    if dim == rows.dim:
        return None
    return rows.moved(rows.places.select(dim, index), rows.dim - (dim < rows.dim))


def _split(rows: Rows, node: Any, port: int) -> Rows | None:
    dim = _dim(node._saved_dim, rows)
    sizes = getattr(node, "_saved_split_sizes", None) or node._saved_split_size
    return None if dim == rows.dim else rows.moved(rows.places.split(sizes, dim)[port])


def _permute(rows: Rows, node: Any, port: int) -> Rows | None:
    dims = [_dim(d, rows) for d in node._saved_dims]
    return rows.moved(rows.places.permute(dims), dims.index(rows.dim))


def _transpose(rows: Rows, node: Any, port: int) -> Rows | None:
    pair = (
        (0, 1)
        if node.name() == "TBackward0"
        else (_dim(node._saved_dim0, rows), _dim(node._saved_dim1, rows))
    )
    if rows.places.dim() < 2:
        return rows
    other = {pair[0]: pair[1], pair[1]: pair[0]}
    return rows.moved(rows.places.transpose(*pair), other.get(rows.dim, rows.dim))


def _expand(rows: Rows, node: Any, port: int) -> Rows | None:
    shape = list(node._input_metadata[port].shape)
    dim = rows.dim + len(shape) - rows.places.dim()
    if shape[dim] != rows.classes:
        return None
    shape[dim] = 1
    return rows.moved(rows.places.expand(shape), dim)


def _index(rows: Rows, node: Any, port: int) -> Rows | None:
    """``logits[mask]`` and the like, where the indices lie side by side and spare the classes."""
    given = list(node._saved_indices)
    used = [place for place, index in enumerate(given) if index is not None]
    if not used or used != list(range(used[0], used[-1] + 1)):
        return None
    # A mask counts for as many dimensions as it has.
    counts = [index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
              for index in given[used[0] :] if index is not None]  # fmt: skip
    first, covered = used[0], sum(counts)
    if first <= rows.dim < first + covered:
        return None
    index = [slice(None) if i is None else i.to(rows.places.device) for i in given]
    places = rows.places[tuple(index)]
    grown = places.dim() - rows.places.dim()
    return rows.moved(places, rows.dim + grown if rows.dim > first else rows.dim)


def _index_select(rows: Rows, node: Any, port: int) -> Rows | None:
    dim, index = _dim(node._saved_dim, rows), node._saved_index
    places = rows.places
    return (
        None if dim == rows.dim else rows.moved(places.index_select(dim, index.to(places.device)))
    )


_RULES: dict[str, Callable[[Rows, Any, int], Rows | None]] = {
    **dict.fromkeys(("CloneBackward0", "LazyCloneBackward0", "AliasBackward0"), _same),
    "ToCopyBackward0": _same,
    **dict.fromkeys(
        (
            *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
            *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
        ),
        _reshape,
    ),
    "SliceBackward0": _slice,
    "SelectBackward0": _select,
    "UnbindBackward0": _unbind,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "PermuteBackward0": _permute,
    "TransposeBackward0": _transpose,
    "TBackward0": _transpose,
    "ExpandBackward0": _expand,
    "IndexBackward0": _index,
    "IndexSelectBackward0": _index_select,
}
"""By the name of the node. Casts are followed for their shape; the type is compared in the end."""
