r"""Cross-entropy, found in the graph between a loss and the outputs.

A loss is taken for cross-entropy where it is linear in log-probabilities,
:math:`L = \sum_{ij} a_{ij} \log p_{ij} + c`, and these are the ``log_softmax`` of rows of the
outputs, rearranged at most (``rearrangement.py``). Its curvature in row i is then
:math:`s_i (\mathrm{diag}\, p_i - p_i p_i^T)` with the share :math:`s_i = -\sum_j a_{ij}`, whether
the :math:`a_{ij}` come from labels, soft targets, smoothing, class weights, masks or a sum of such
losses with coefficients. A factor that has a graph of its own (a learnt temperature, a probability
that is not detached) makes it another loss: it is left to the general way, like every node that is
not in the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.curvature.rearrangement import Rows, follow, in_rows, signed
from seht.tensors.graph import node_of

_MEAN = 1
_LINEAR = frozenset(
    f"{name}Backward{kind}"
    for kind in "01"
    for name in (
        *("Add", "Sub", "Neg", "Mul", "Div", "Sum", "Mean", "Dot", "MaskedFill", "Where"),
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Expand", "Unsqueeze"),
        *("Squeeze", "Slice", "Select", "Unbind", "Split", "SplitWithSizes", "Permute", "T"),
        *("Transpose", "Index", "IndexSelect", "Gather", "MaskedSelect", "Cat", "Stack"),
        *("NllLoss", "NllLoss2D"),
    )
)
"""Backward nodes of functions that are linear, if factors and denominators are constants."""
_FACTORS = ("MulBackward", "DivBackward", "DotBackward")
_AT_HAND = (1 << 25, 1 << 18)
"""How many logits to handle at a time, on a GPU and on a CPU (a megabyte fits into its cache)."""
_STRETCH = (1 << 29, 1 << 26)
"""How many bytes of logits to form at a time where they are not kept, on a GPU and on a CPU."""
Edge = tuple[Any, int]


@dataclass(frozen=True)
class CrossEntropy:
    """One ``log_softmax`` of rows of an output, and the loss's derivative in it."""

    place: int
    """Which of the outputs."""
    dim: int
    """The output's dimension of classes."""
    rows: Tensor | None
    """Which of the output's rows, in the order of ``share``; None: all of them, in order."""
    share: Tensor
    """s, the factor of the curvature of each row, as a column."""
    labels: tuple[tuple[Tensor, Tensor], ...]
    """Derivatives that are nonzero for one class in each row: columns of classes and values."""
    spread: tuple[Tensor, ...]
    """Derivatives as full tensors."""
    even: tuple[tuple[Tensor, Tensor], ...] = ()
    """Derivatives of rank one: a factor for each row, and a value for each class."""

    def add_slope(self, total: Tensor, part: slice, p: Tensor, factor: Any = 1.0) -> None:
        """Add dL/dz of some rows, times a factor, where their probabilities are p."""
        total.addcmul_(p, self.share[part] * factor)
        for classes, values in self.labels:
            total.scatter_add_(1, classes[part], values[part] * factor)
        for spread in self.spread:
            total.add_(spread[part] * factor)
        for column, row in self.even:
            total.addcmul_(column[part] * factor, row)

    def stretches(self, classes: int) -> Iterator[tuple[slice, slice | Tensor]]:
        """A few rows at a time: their places here and in the output."""
        for part in _at_hand(self.share.shape[0], classes, self.share.device):
            yield part, part if self.rows is None else self.rows[part]

    def holds(self, z: Tensor, log_p: Tensor) -> bool:
        """Whether the logits are the output's numbers, too, but for a constant in each row: a
        closure may have written into them where no graph shows it.
        """
        logits = in_rows(z.detach(), self.dim)
        apart = [log_p.new_zeros(1)]
        for part, rows in self.stretches(log_p.shape[1]):
            offset = logits[rows] - log_p[part]
            low, high = offset.aminmax(dim=1)
            apart.append((high - low) / (1 + torch.maximum(high, -low)))
        # Anything but a number compares as False.
        return bool(torch.cat(apart).max() < 64 * torch.finfo(log_p.dtype).eps)


def cross_entropies(loss: Tensor, outputs: list[Tensor]) -> list[CrossEntropy] | None:
    """The cross-entropies of a loss, if it depends on the outputs in no other way."""
    if not all(type(t) is Tensor and not is_functorch_wrapped_tensor(t) for t in (loss, *outputs)):
        return None
    ends = {(node_of(z), z.output_nr): place for place, z in enumerate(outputs)}
    if (loss.grad_fn, loss.output_nr) in ends:
        return None
    order = _towards((loss.grad_fn, loss.output_nr), ends)
    if not order:
        return None
    try:
        with torch.no_grad():
            return _Walk(outputs, ends, set(order)).terms(loss, order)
    except RuntimeError as error:
        # A node that cannot be gone through with several gradients at once, or whose tensors have
        # been overwritten: the general way answers, or says why not. Memory that has run out is the
        # user's to hear of; the general way needs more.
        if type(error) is not RuntimeError or "allocate memory" in str(error):
            raise
        return None


def _at_hand(count: int, classes: int, device: torch.device) -> Iterator[slice]:
    """As many rows at a time as fit into a CPU's cache, or as are worth a kernel on a GPU."""
    return _parts(count, max(1, _AT_HAND[device.type == "cpu"] // max(1, classes)))


def at_hand(part: slice, logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """The same of the logits of a stretch: their places there, and among all rows."""
    for near in _at_hand(len(logits), logits.shape[1], logits.device):
        yield near, slice(part.start + near.start, part.start + near.stop)


def stretches(count: int, weight: Tensor) -> Iterator[slice]:
    """A few rows at a time, for a head of that weight."""
    size = weight.shape[0] * weight.element_size()
    step = max(1, _STRETCH[weight.device.type == "cpu"] // size)
    return _parts(count, max(1, -(-count // max(1, -(-count // step)))))  # all alike


def _parts(count: int, step: int) -> Iterator[slice]:
    """No rows are one part: a mask may leave none."""
    return (slice(start, min(count, start + step)) for start in range(0, max(1, count), step))


def linear_in(loss: Tensor, parts: list[Tensor]) -> list[Tensor] | None:
    """The loss's derivatives in some tensors of its graph, if it is linear in them."""
    ends = {(t.grad_fn, t.output_nr): place for place, t in enumerate(parts)}
    root = (loss.grad_fn, loss.output_nr)
    if root not in ends and not all(map(_is_linear, _towards(root, ends))):
        return None
    return list(torch.autograd.grad(loss, parts, retain_graph=True, materialize_grads=True))


def _is_linear(node: Any) -> bool:
    name, parents = node.name(), node.next_functions
    if name not in _LINEAR:
        return False
    if name.startswith(_FACTORS) and sum(parent is not None for parent, _ in parents) > 1:
        return False
    return not (name.startswith("Div") and parents[0][0] is None)


def _towards(root: Edge, ends: dict[Edge, int]) -> list[Any]:
    """The nodes on the way from the root to the outputs, each before those it leads to."""
    leads: dict[Any, bool] = {}
    order: list[Any] = []
    stack: list[tuple[Any, bool]] = [(root[0], False)]
    while stack:
        node, done = stack.pop()
        if done:
            leads[node] = any(e in ends or leads.get(e[0], False) for e in node.next_functions)
            if leads[node]:
                order.append(node)
        elif node is not None and node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((edge[0], False) for edge in node.next_functions if edge not in ends)
    return order[::-1]


class _Walk:
    """From the loss to the log-probabilities, with the loss's derivative."""

    def __init__(self, outputs: list[Tensor], ends: dict[Edge, int], way: set[Any]) -> None:
        self._outputs, self._ends, self._way = outputs, ends, way
        self._spread: dict[Edge, list[Tensor]] = {}
        """The derivative in the output of each node, in parts."""
        self._labels: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def terms(self, loss: Tensor, order: list[Any]) -> list[CrossEntropy] | None:
        """The cross-entropies; None where something else is met."""
        self._spread[loss.grad_fn, loss.output_nr] = [torch.ones_like(loss)]
        behind: set[Any] = set()  # between outputs and logits, as each logit's path has seen it
        found = []
        for node in order:
            if node in behind:
                continue
            if node.name() == "LogSoftmaxBackward0":
                term = self._term(node, behind)
                if term is None:
                    return None
                found.append(term)
            elif not self._pass_on(node):
                return None
        left = [node for node, _ in self._spread if node.name() != "LogSoftmaxBackward0"]
        dims = {(term.place, term.dim) for term in found}
        if left or len(dims) != len({place for place, _ in dims}):
            return None  # the logits are used in another way, too, or with other classes
        return found

    def _pass_on(self, node: Any) -> bool:
        """Give the derivative to the nodes behind, if this one is linear."""
        name, parents = node.name(), node.next_functions
        if not _is_linear(node) or any(edge in self._ends for edge in parents):
            return False  # the outputs themselves, without a log_softmax
        if not any(key[0] is node for key in self._spread):
            return True  # its derivative was 0
        if name.startswith("NllLoss") and self._label(node):
            return True
        edges = [(node, port) for port in range(len(node._input_metadata))]
        found = node(*(_total(self._spread.pop(e)) if e in self._spread else None for e in edges))
        parts = found if isinstance(found, tuple) else (found,)
        for edge, part in zip(parents, parts, strict=True):
            if edge[0] in self._way and part is not None:
                if part.layout != torch.strided:
                    return False
                self._spread.setdefault(edge, []).append(part)
        return True

    def _label(self, nll: Any) -> bool:
        """One class of each row: no need for a tensor that is 0 elsewhere."""
        shape = nll._saved_self.shape
        node = nll.next_functions[0][0]
        while node.name() == "ViewBackward0" and node._saved_self_sym_sizes[:2] == shape[:2]:
            node = node.next_functions[0][0]
        if node.name() != "LogSoftmaxBackward0":
            return False
        if signed(node._saved_dim) % len(_shape(node)) != min(1, len(shape) - 1):
            return False
        given = _total(self._spread.pop((nll, 0)))
        target = nll._saved_target.flatten()
        ignored = target == signed(nll._saved_ignore_index)
        target = target.masked_fill(ignored, 0)  # what is ignored need not be a class
        value = -given.flatten().expand(target.shape)
        if nll._saved_weight is not None:
            value = value * nll._saved_weight[target]
        if nll._saved_reduction == _MEAN:
            value = value / nll._saved_total_weight
        value = value.masked_fill(ignored, 0)
        self._labels.setdefault(node, []).append((target.unsqueeze(1), value.unsqueeze(1)))
        return True

    def _term(self, node: Any, behind: set[Any]) -> CrossEntropy | None:
        result = node._saved_result
        dim = signed(node._saved_dim) % max(1, result.dim())
        found = self._rows(node, dim, behind)
        if found is None:
            return None
        place, start, end = found
        rows = end.places.flatten()
        labels = tuple(self._labels.get(node, ()))
        spread = tuple(in_rows(part, dim) for part in self._spread.get((node, 0), ()))
        slopes = [*(value for _, value in labels), *(part.sum(-1, keepdim=True) for part in spread)]
        share = -_total(slopes or [result.new_zeros(rows.numel(), 1)])
        whole = end is start or torch.equal(rows, start.places.flatten())
        own = None if whole else rows.to(result.device)
        term = CrossEntropy(place, start.dim, own, share, labels, spread)
        return term if term.holds(self._outputs[place], in_rows(result, dim)) else None

    def _rows(self, log_softmax: Any, dim: int, behind: set[Any]) -> tuple[int, Rows, Rows] | None:
        """The output, its rows, and which of them these logits are."""
        path: list[Edge] = []
        edge = log_softmax.next_functions[0]
        while edge not in self._ends:
            node = edge[0]
            leading = [e for e in node.next_functions if e in self._ends or e[0] in self._way]
            if len(leading) != 1:
                return None
            path.append(edge)
            edge = leading[0]
        place = self._ends[edge]
        z, shape = self._outputs[place], _shape(log_softmax)
        behind.update(node for node, _ in path)
        kinds = {node._input_metadata[port].dtype for node, port in [*path, (log_softmax, 0)]}
        if kinds != {z.dtype} or not shape or shape[dim] < 2:
            return None
        for start in reversed(range(z.dim())):
            if z.shape[start] != shape[dim]:
                continue
            first = Rows.of(z.shape, start)
            rows = follow(first, path)
            if rows is None or rows.dim != dim:
                continue
            if rows.places.numel() * shape[dim] == shape.numel():
                return place, first, rows
        return None


def _shape(node: Any) -> torch.Size:
    """The shape of a result; to look at a saved tensor makes another one."""
    return torch.Size(node._input_metadata[0].shape)


def _total(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])
