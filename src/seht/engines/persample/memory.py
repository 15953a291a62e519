"""What holds from step to step: where the examples were found, and answers of experiments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from seht.engines.kinks import spellings
from seht.engines.persample.axes import Tag
from seht.engines.persample.calls import Call

_BY_CONTENT = frozenset(
    spellings("""
        gather take take_along_dim scatter scatter_ scatter_add scatter_add_ index_add index_add_
        index_copy index_copy_ index_fill index_put index_put_ masked_select masked_scatter
        __setitem__ scatter_reduce index_reduce
    """)
)
"""Functions whose answer depends on what an index tensor holds: asked anew in each step."""
_REPEAT = frozenset(spellings("repeat_interleave"))


@dataclass(frozen=True)
class Layout:
    """How the examples are looked for."""

    dim: int = 0
    """The dimension of the model's inputs that holds them."""
    adopt: bool = True
    """Whether a constant that has their number along that dimension belongs to them."""
    deep: bool = False
    """Whether the inputs of the model's parts count: the closure does not call the model itself."""


@dataclass
class Memory:
    """What holds from step to step: the layout that was found, answers of experiments."""

    layout: Layout | None = None
    answers: dict[Any, list[Tag | None]] = field(default_factory=dict)
    affine: bool | None = None
    """Whether the outputs are affine in each weight alone; ``None`` before it was tried."""
    curved: bool = False
    """Whether the loss was seen to have curvature in the outputs, for the Gauss-Newton trace."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles ask anew."""
        return {"layout": self.layout, "answers": {}}

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
    for adopt, deep in ((True, False), (True, True), (False, False), (False, True)):
        for dim in dims:
            if Layout(dim, adopt, deep) != memory.layout:
                yield Layout(dim, adopt, deep)


def key_of(call: Call) -> Any:
    """What the answer to a call depends on; None if on more than shapes and arguments."""
    if call.func in _BY_CONTENT or (call.func in _REPEAT and len(call.given) > 1):
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
