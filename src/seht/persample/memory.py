"""What SEHT-S remembers between steps: where the examples lie, and results of experiments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seht.operators.axes import Call, Tag
from seht.operators.operator import named
from seht.operators.table import BY_CONTENT

_REPEAT = frozenset(named("repeat_interleave"))


@dataclass(frozen=True)
class Layout:
    """How the examples are looked for."""

    dim: int = 0
    """The dimension of the model's inputs that holds them."""
    adopt: bool = True
    """Whether a constant that has their number along that dimension belongs to them."""
    deep: bool = False
    """Whether the inputs of the model's parts count: the closure does not call the model itself."""
    leaves: bool = False
    """Whether leaves of the closure's own belong to the examples from the start: it takes
    gradients in them."""


@dataclass
class Memory:
    """The layout that was found, results of experiments, and what the closure was seen to do."""

    layout: Layout | None = None
    answers: dict[Any, list[Tag | None]] = field(default_factory=dict)
    inner: bool = False
    """Whether the closure takes gradients itself."""
    graph: bool = False
    """Whether a measurement has to keep the graph, because the closure itself uses it."""
    affine: bool | None = None
    """Whether the outputs are affine in each weight alone; ``None`` before it was tried."""
    curved: bool = False
    """Whether the loss was seen to have curvature in the outputs, for the Gauss-Newton trace."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without memory."""
        return {"layout": self.layout, "answers": {}}

    def located(self, layout: Layout) -> None:
        """The examples were found there: look there first."""
        self.layout = layout

    def met_inner(self) -> None:
        """The closure takes gradients itself."""
        self.inner = True

    def needs_graph(self) -> None:
        """A measurement failed for want of a graph."""
        self.graph = True

    def tried_affine(self, found: bool) -> None:
        """Whether the outputs turned out affine in each weight alone."""
        self.affine = found

    def saw_curvature(self) -> None:
        """The loss has curvature in the outputs: no need to look again."""
        self.curved = True

    def keep(self, key: Any, tags: list[Tag | None]) -> None:
        """Remember an answer, within reason."""
        if len(self.answers) > 10_000:
            self.answers.clear()
        self.answers[key] = tags


def layouts(batch_dim: int | None, memory: Memory) -> Iterator[Layout]:
    """Where to look for the examples, the likeliest place first."""
    if memory.layout is not None:
        yield memory.layout
    dims = (0, 1) if batch_dim is None else (batch_dim,)
    for leaves in (False, True):
        if leaves and not memory.inner:
            return
        for adopt, deep in ((True, False), (True, True), (False, False), (False, True)):
            for dim in dims:
                if Layout(dim, adopt, deep, leaves) != memory.layout:
                    yield Layout(dim, adopt, deep, leaves)


def key_of(call: Call) -> Any:
    """The key of an experiment's result; None if it depends on more than shapes and arguments."""
    if call.func in BY_CONTENT or (call.func in _REPEAT and len(call.given) > 1):
        return None
    if any(t.layout != torch.strided for t in call.given):  # a graph
        return None
    tags = iter(call.tags)
    try:
        key = (call.func, call.n, _frozen(call.args, tags), _frozen(call.kwargs, tags))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any, tags: Iterator[Tag | None]) -> Any:
    """A hashable description of arguments."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, next(tags))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_frozen(item, tags) for item in value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v, tags)) for k, v in value.items())
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return value
