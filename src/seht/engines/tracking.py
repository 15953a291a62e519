"""Follows the examples through a closure, and notes how each probed weight is used."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from seht.engines.axes import (
    COMPILED,
    SUM,
    Axis,
    Broken,
    ExampleError,
    Tag,
    axis_from,
    every_tensor,
)
from seht.engines.axis_rules import AXES, LINEAR, MOVEMENT, Call, couples, moved
from seht.engines.experiment import ask
from seht.engines.kinks import IN_PLACE, spellings
from seht.engines.prefix import root_of
from seht.engines.state import RandomState

_BY_CONTENT = frozenset(
    spellings("""
        gather take take_along_dim scatter scatter_ scatter_add scatter_add_ index_add index_add_
        index_copy index_copy_ index_fill index_put index_put_ masked_select masked_scatter
        __setitem__ scatter_reduce index_reduce
    """)
)
"""Functions whose answer depends on what an index tensor holds: asked anew in each step."""
_REPEAT = frozenset(spellings("repeat_interleave"))
_SET = torch.Tensor.__setitem__
_GRAD = torch.autograd.grad


class Part(NamedTuple):
    """A probed weight or a view of it: the calls that lead from the one to the other."""

    name: str
    path: tuple[tuple[Any, Any, Any, int | None], ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The same view of another tensor of the weight's shape."""
        for func, args, kwargs, place in self.path:
            tensor = func(tensor, *args, **kwargs)
            tensor = tensor if place is None else tensor[place]
        return tensor


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

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles ask anew."""
        return {"layout": self.layout, "answers": {}}

    def keep(self, key: Any, tags: list[Tag | None]) -> None:
        """Remember an answer, within reason."""
        if len(self.answers) > 10_000:
            self.answers.clear()
        self.answers[key] = tags


class Tracker:
    """The tags of one centre pass."""

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        random: RandomState,
        memory: Memory,
        layout: Layout,
        *,
        coupling: str = "refuse",
    ) -> None:
        self.n = 0
        self.layout = layout
        self.coupling = coupling
        self.shared: dict[str, str] = {}
        """Weights that keep one direction for all examples, and why."""
        self.varied: set[str] = set()
        """Weights with a use that has a per-sample form."""
        self.calls = 0
        self.hidden = False
        """Inside the forward of a custom Function, where what is computed looks constant."""
        self.holds = False
        """Whether batch statistics are held: their gradient needs the centre's graph."""
        self._model = model
        self._weights = {id(w): name for name, w in weights.items()}
        self._by_name = weights
        self._random = random
        self._memory = memory
        self._since = 0
        self._tags: dict[int, tuple[weakref.ref[Tensor], Tag | None]] = {}
        self._parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}
        self._depth = 0
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}

    def begin(self, since: int) -> Tracker:
        """Graph nodes made from now on are the closure's."""
        self._since = since
        return self

    def moving(self) -> set[str]:
        """The weights with a direction for each example."""
        return self.varied - self.shared.keys()

    # --- the model's inputs -----------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tag what the outermost calls of the model are given."""
        modules = list(self._model.modules()) if self.layout.deep else [self._model]
        handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            with torch._C.DisableTorchFunction():
                self._begin((args, kwargs))

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._depth -= 1

    def _begin(self, value: Any) -> None:
        if isinstance(value, PackedSequence):
            self._begin_packed(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._begin(item)
        elif isinstance(value, dict) or hasattr(value, "keys"):
            for key in value:
                self._begin(value[key])
        elif isinstance(value, Tensor) and id(value) not in self._own and self._new(value):
            for dim in (self.layout.dim, 1 - self.layout.dim):
                if value.dim() > dim >= 0 and (not self.n or value.shape[dim] == self.n):
                    self.n = self.n or value.shape[dim]
                    self.tag(value, Axis(dim))
                    return

    def _new(self, value: Tensor) -> bool:
        """Whether this is where examples begin; what the closure made on the way counts as an
        input of the model (a slice of the batch), but not as one of a part of it (positions).
        """
        return not self._seen(value) if self.layout.deep else self.get(value) is None

    def _begin_packed(self, value: PackedSequence) -> None:
        count = int(value.batch_sizes[0])
        self.n = self.n or count
        if self.n == count and self._new(value.data):
            order = value.sorted_indices
            order = torch.arange(count, device="cpu") if order is None else order
            owners = [order[:k].cpu() for k in value.batch_sizes.tolist()]
            self.tag(value.data, axis_from(0, torch.cat(owners), count))

    # --- tags -------------------------------------------------------------------------------------

    def tag(self, tensor: Tensor, tag: Tag | None) -> None:
        """Give a tensor its tag."""
        constant = not tensor.requires_grad and not self.hidden
        if constant and (tag is SUM or isinstance(tag, Broken)):
            tag = None  # a constant couples nothing
        self._tags[id(tensor)] = (weakref.ref(tensor), tag)

    def _seen(self, tensor: Tensor) -> bool:
        entry = self._tags.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def get(self, tensor: Tensor) -> Tag | None:
        """The tag of a tensor."""
        entry = self._tags.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() >= self._since and self.part(tensor) is None:
            return Broken(
                f"{node.name()} is an operation that PyTorch does not show (wrap the apply of a "
                "custom autograd.Function with seht.register_kink)"
            )
        return None

    def knows(self, out: Any) -> bool:
        """Whether everything a call returned has its tag already, from the calls inside it."""
        outs = list(every_tensor(out))
        return bool(outs) and all(map(self._seen, outs))

    def same(self, old: Tensor, new: Tensor) -> None:
        """A copy made unseen has the tag of what it is a copy of."""
        self.tag(new, self.get(old))

    def axis(self, tensor: Tensor, func: Any, *, features: tuple[int, ...]) -> Axis | None:
        """The axis of what a layer is given, or None where it is the same for all examples.

        ``features`` are the dimensions that the layer works along.
        """
        tag = self.get(tensor)
        rank = tensor.dim()
        taken = {d % rank for d in features} if rank else set()
        name = getattr(func, "__name__", str(func))
        if isinstance(tag, Axis):
            if tag.dim in taken:
                raise ExampleError(self._explain(f"{name} works along the examples"))
            return tag
        if tag is not None:
            reason = tag.reason if isinstance(tag, Broken) else f"{name} is given a sum over them"
            if self.coupling == "own":
                return None
            raise ExampleError(self._explain(reason))
        if self.layout.adopt and self.n > 1 and not tensor.requires_grad:
            for dim in (self.layout.dim, 1 - self.layout.dim):
                if 0 <= dim < rank and dim not in taken and tensor.shape[dim] == self.n:
                    return Axis(dim)
        return None

    # --- weights ----------------------------------------------------------------------------------

    def part(self, tensor: Any) -> Part | None:
        """The probed weight that a tensor is, or is a view of."""
        if not isinstance(tensor, Tensor):
            return None
        name = self._weights.get(id(tensor))
        if name is not None:
            return Part(name)
        entry = self._parts.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def weight(self, name: str) -> Tensor:
        """The probed weight of that name."""
        return self._by_name[name]

    def share(self, part: Part | None, why: str) -> None:
        """A use without a per-sample form: one direction for all examples, in all uses."""
        if part is not None:
            self.shared.setdefault(part.name, why)

    def _weigh(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], outs: Any) -> None:
        for tensor in given:
            part = self.part(tensor)
            if part is None or all(o is tensor for o in outs):
                continue
            if not self.hidden and not any(o.requires_grad for o in outs):
                continue
            if func in MOVEMENT and len(given) == 1 and args and args[0] is tensor:
                single = len(outs) == 1 and not isinstance(outs, tuple)
                for place, out in enumerate(outs):
                    step = (func, args[1:], kwargs, None if single else place)
                    self._parts[id(out)] = (
                        weakref.ref(out),
                        Part(part.name, (*part.path, step)),
                    )
            else:
                self.share(part, f"used by {getattr(func, '__name__', func)}")

    # --- from call to call ------------------------------------------------------------------------

    def follow(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, *, weigh: bool = True
    ) -> None:
        """Tag what a call returned."""
        self.calls += 1
        if func is _SET or (func in IN_PLACE and out is None):
            out = args[0]
        outs: Any = [out] if isinstance(out, Tensor) else tuple(every_tensor(out))
        if not outs:
            return
        given = list(every_tensor((args, kwargs)))
        if weigh:
            self._weigh(func, args, kwargs, given, outs)
        tags = [self.get(t) for t in given]
        if not any(tag is not None for tag in tags):
            for o in outs:
                if id(o) not in self._own:
                    self.tag(o, None)
            return
        call = Call(func, args, kwargs, given, tags, out, self.n)
        found = self._tags_of(call, len(outs))
        if self.coupling == "own":
            found = [self._owned(call, o, tag) for o, tag in zip(outs, found, strict=True)]
        for o, tag in zip(outs, found, strict=True):
            self.tag(o, tag)
            base = root_of(o)
            if func in IN_PLACE and base is not o and tag is not None and self.get(base) is None:
                self.tag(base, Broken(f"{call.name} writes examples into a view of a constant"))

    def _tags_of(self, call: Call, count: int) -> list[Tag | None]:
        broken = next((t for t in call.tags if isinstance(t, Broken)), None)
        if broken is not None:
            return [broken] * count
        if self.n == 1:
            return [None] * count
        if call.func is _GRAD:
            wanted = list(every_tensor(call.argument(1, "inputs")))
            return (
                [self.get(t) for t in wanted][:count]
                if len(wanted) == count
                else [couples(call)] * count
            )
        if any(t is SUM for t in call.tags) and call.func in LINEAR:
            clean = all(t is SUM or t is None for t in call.tags)
            return [SUM if clean else couples(call)] * count
        rule = AXES.get(call.func)
        if rule is not None and (isinstance(call.out, Tensor) or call.func in _PACKING):
            tag = rule(call)
            return [tag] + [None if count > 1 else tag] * (count - 1)
        if any(t is SUM for t in call.tags):
            return [couples(call)] * count
        if call.func is _SET:
            return [self._written(call)]
        key = self._key(call)
        if key is not None and key in self._memory.answers:
            return self._memory.answers[key]
        moves = call.func in MOVEMENT and isinstance(self._first(call), Axis)
        tags = moved(call) if moves else ask(call, self._random)
        if len(tags) != count:
            tags = [couples(call)] * count
        if key is not None:
            self._memory.keep(key, tags)
        return tags

    def _first(self, call: Call) -> Tag | None:
        whole = bool(call.args) and call.given[0] is call.args[0]
        return call.tags[0] if whole else None

    def _written(self, call: Call) -> Tag | None:
        """target[index] = value: where the value's examples lie in the target."""
        target, index, value = call.args
        known = self.get(target)
        for axis in [known] if isinstance(known, Axis) else self._possible(target):
            slot = Call(torch.Tensor.__getitem__, (target, index), {}, [target], [axis],
                        target[index], self.n)  # fmt: skip
            place = AXES[torch.Tensor.__getitem__](slot)
            tag = self.get(value) if isinstance(value, Tensor) else None
            if tag is None:
                return known
            if isinstance(tag, Axis) and place == tag.at(tag.dim + slot.out.dim() - value.dim()):
                return axis
        return couples(call)

    def _possible(self, tensor: Tensor) -> list[Axis]:
        return [Axis(d) for d, size in enumerate(tensor.shape) if size == self.n]

    def _owned(self, call: Call, out: Tensor, tag: Tag | None) -> Tag | None:
        """Coupled on purpose: the examples stay where they were, if that is still a place."""
        if not isinstance(tag, Broken):
            return tag
        for t, axis in zip(call.given, call.tags, strict=True):
            place = axis.dim if isinstance(axis, Axis) else out.dim()
            if place < out.dim() and out.shape[place] == t.shape[place]:
                return axis
        return None

    def _key(self, call: Call) -> Any:
        if call.func in _BY_CONTENT or (call.func in _REPEAT and len(call.given) > 1):
            return None
        tags = iter(call.tags)
        try:
            key = (call.func, self.n, _frozen(call.args, tags), _frozen(call.kwargs, tags))
            hash(key)
        except TypeError:
            return None
        return key

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, loss: Tensor) -> None:
        """The loss must be a sum over the examples."""
        if not self.n:
            raise ExampleError(
                "estimator='seht-s' found no examples: the closure calls neither the model nor a "
                "part of it with a tensor that has a batch dimension; call model(inputs) in the "
                "closure, or use estimator='seht-h'"
            )
        if self.n == 1:  # its own probe is the shared one
            self.shared.update(dict.fromkeys(self._weights.values(), "the batch is one example"))
            return
        tag = self.get(loss)
        if isinstance(tag, Broken) and self.coupling != "own":
            raise ExampleError(self._explain(tag.reason))
        if not self.moving() and self.varied | self.shared.keys():
            raise ExampleError(
                self._explain("no probed weight meets the examples on its own: " + self._why())
            )

    def _why(self) -> str:
        name, why = next(iter(self.shared.items()))
        return f"{name} for one: {why}"

    def _explain(self, reason: str) -> str:
        return (
            f"estimator='seht-s' needs a loss that is a sum over examples, and here {reason}; use "
            "estimator='seht-h', keep the examples apart up to the loss, or say where they lie "
            f"with batch_dim= (now dimension {self.layout.dim} of the model's inputs)"
        )


def layouts(batch_dim: int | None, memory: Memory) -> Iterator[Layout]:
    """Where to look for the examples, the likeliest place first."""
    if memory.layout is not None:
        yield memory.layout
    dims = (0, 1) if batch_dim is None else (batch_dim,)
    for adopt, deep in ((True, False), (True, True), (False, False), (False, True)):
        for dim in dims:
            if Layout(dim, adopt, deep) != memory.layout:
                yield Layout(dim, adopt, deep)


def refuse_compiled(model: nn.Module) -> None:
    """A compiled model hides its operations."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ExampleError(COMPILED)


_PACKING = frozenset(
    [
        torch._C._VariableFunctions._pack_padded_sequence,
        torch._C._VariableFunctions._pad_packed_sequence,
    ]
)


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
