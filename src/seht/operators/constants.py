"""Rules for what autograd holds constant: a perturbed pass gets what the centre pass got."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seht.errors import KinkError
from seht.operators.orders import refuse_wrong
from seht.operators.rules import KeepGraph, Rule, first
from seht.tensors.hooks import heard_anyway, unheard
from seht.tensors.layouts import duplicate


def _constant_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    kept = out
    if isinstance(out, Tensor) and out.requires_grad:  # with a gradient, which is always 0
        kept = out.detach().requires_grad_()
    return out, (kept, mode.state_after(func))


def _constant_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    out, state = decision
    mode.jump_to(state)
    return out


CONSTANT = Rule(_constant_record, _constant_replay)


def _alias_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    # What it is an alias of may be overwritten later, by an in-place activation for one.
    # (Weights are not, and the recorder knows that they move.)
    own = isinstance(first(args, kwargs), nn.Parameter)
    return out, (out if own else duplicate(out), None)


def _alias_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    # A tensor of its own in every pass: the closure may ask it for a gradient.
    return decision[0].detach()


ALIAS = Rule(_alias_record, _alias_replay)
"""``detach`` and ``data``, which share the memory of what they are taken from."""


def _cast_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    smooth = isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex())
    return out, None if smooth else out  # x.type() is a string


def _cast_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs) if decision is None else decision


CAST = Rule(_cast_record, _cast_replay)
"""Constant where the result is integer or boolean."""


def _assigned_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    moved = offset(args[1].detach(), args[0].detach().clone())
    return func(*args, **kwargs), moved


def _assigned_replay(mode: Any, moved: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0], args[0].detach() + moved)


ASSIGNED = Rule(_assigned_record, _assigned_replay)
"""``x.data = y`` in the middle of a graph: x has another value, and to autograd its old slope."""


def offset(after: Tensor, before: Tensor) -> Tensor:
    """What a value was moved by, unseen by autograd; nothing where it is as infinite as it was."""
    moved = after - before
    return moved.masked_fill_(moved.isnan(), 0)


def _detached_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    return out, duplicate(out)


def _detached_replay(mode: Any, kept: Any, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    out.data = duplicate(kept)  # new memory: the old one may be saved for a backward
    return out


DETACHED = Rule(_detached_record, _detached_replay)
"""``detach_``."""


def _gradient_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if mode.cut:
        raise KeepGraph
    out = func(*args, **kwargs)
    graph = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
    if graph:
        _whole_graph(mode)
        if mode.witness is not None:
            _refuse_wrong(*_ends(args, kwargs))
    return out, None if graph else out


def _ends(args: Any, kwargs: Any) -> Iterator[list[Tensor]]:
    """The outputs and the inputs of ``autograd.grad``."""
    for place, name in enumerate(("outputs", "inputs")):
        value = args[place] if place < len(args) else kwargs[name]
        yield [
            t for t in ((value,) if isinstance(value, Tensor) else value) if isinstance(t, Tensor)
        ]


def _refuse_wrong(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """A gradient of a gradient through a fused norm: that of the loss is wrong, in any training."""
    refuse_wrong(
        outputs,
        inputs,
        2,
        "write the norm out in elementary operations, for the plain training, too",
        "is differentiated by the closure and once more by the training, and",
    )


def _whole_graph(mode: Any) -> None:
    """Every pass takes this gradient in its own graph, which a kept prefix would cut short."""
    prefix = getattr(mode, "prefix", None)
    if prefix is not None:
        prefix.spoil()


def _gradient_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs) if decision is None else decision


GRADIENT = Rule(_gradient_record, _gradient_replay)
"""A gradient taken inside the closure: a constant, unless it keeps its graph."""


def _backward_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if mode.cut:
        raise KeepGraph
    _whole_graph(mode)
    return func(*args, **kwargs), None


def _backward_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


BACKWARD = Rule(_backward_record, _backward_replay, taped=False)
"""A backward pass inside the closure, for the gradient of an input."""


def _hooked_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not torch.compiler.is_compiling() and not heard_anyway(args):
        mode.hooked = True
        if mode.lean:
            raise KeepGraph
    return func(*args, **kwargs), None


def _hooked_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs) if heard_anyway(args) else unheard()


HOOKED = Rule(_hooked_record, _hooked_replay, taped=False)
"""A hook on a tensor of the closure's: only in the pass that the user differentiates."""


def _padded_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
    if kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None:
        raise KinkError(
            "embedding with max_norm rewrites its weights in every pass, which the difference "
            "engine cannot freeze; normalise the weights before the closure"
        )
    row = None if padding is None else (padding % len(weight), weight[padding].detach().clone())
    return func(*args, **kwargs), row


def _padded_replay(mode: Any, row: Any, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if row is None:
        return out
    return torch.where((first(args, kwargs) == row[0]).unsqueeze(-1), row[1], out)


PADDED = Rule(_padded_record, _padded_replay)
"""Embeddings: to autograd the row of ``padding_idx`` is a constant."""
