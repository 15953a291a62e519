"""Rules for what autograd holds constant, and for random numbers: a perturbed pass gets what the
centre pass got.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.operators.arithmetic import additive, elementwise
from seht.operators.operator import Operator, by_name, jointly, named
from seht.operators.orders import refuse_wrong
from seht.operators.pieces import LINEAR
from seht.operators.rules import (
    KeepGraph,
    Mode,
    Recording,
    Rule,
    first,
    kept_or_run,
    opened,
    refused,
)
from seht.tensors.graph import REGISTER, heard_anyway, unheard
from seht.tensors.memory import duplicate, laid_out, layout_of
from seht.tensors.trees import tensors


def _constant_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    kept = out
    if isinstance(out, Tensor) and out.requires_grad:  # with a gradient, which is always 0
        kept = out.detach().requires_grad_()
    return out, (kept, mode.state_after(func))


def _constant_replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    out, state = decision
    mode.jump_to(state)
    return out


CONSTANT = Rule(_constant_record, _constant_replay)


def _alias_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    # What it is an alias of may be overwritten later, by an in-place activation for one.
    # (Weights are not, and the recorder knows that they move.)
    own = isinstance(first(args, kwargs), nn.Parameter)
    return out, (out if own else duplicate(out), None)


def _alias_replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    # A tensor of its own in every pass: the closure may ask it for a gradient.
    return decision[0].detach()


ALIAS = Rule(_alias_record, _alias_replay)
"""``detach`` and ``data``, which share the memory of what they are taken from."""


def _cast_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    smooth = isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex())
    return out, None if smooth else out  # x.type() is a string


CAST = Rule(_cast_record, kept_or_run)
"""Constant where the result is integer or boolean."""


def _assigned_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    moved = offset(args[1].detach(), args[0].detach().clone())
    return func(*args, **kwargs), moved


def _assigned_replay(mode: Mode, moved: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0], args[0].detach() + moved)


ASSIGNED = Rule(_assigned_record, _assigned_replay)
"""``x.data = y`` in the middle of a graph: x has another value, and to autograd its old slope."""


def offset(after: Tensor, before: Tensor) -> Tensor:
    """How far a value was moved behind autograd's back; 0 where it stayed infinite."""
    moved = after - before
    return moved.masked_fill_(moved.isnan(), 0)


def _detached_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    return out, duplicate(out)


def _detached_replay(mode: Mode, kept: Any, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    out.data = duplicate(kept)  # new memory: the old one may be saved for a backward
    return out


DETACHED = Rule(_detached_record, _detached_replay)
"""``detach_``."""


_grad_arguments = by_name(torch.autograd.grad)


def _gradient_record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if mode.cut:
        raise KeepGraph
    out = func(*args, **kwargs)
    given = _grad_arguments(args, kwargs)
    graph = given.get("create_graph", False)
    if graph:
        mode.spoil_prefix()  # every pass takes this gradient in its own graph
        if mode.watched:
            # Of a gradient through a fused norm: that of the loss is wrong, in any training.
            refuse_wrong(
                list(tensors(given["outputs"])),
                list(tensors(given["inputs"])),
                2,
                "write the norm out in elementary operations, for the plain training, too",
                "is differentiated by the closure and once more by the training, and",
            )
    return out, None if graph else out


GRADIENT = Rule(_gradient_record, kept_or_run)
"""A gradient taken inside the closure: a constant, unless it keeps its graph."""


def _backward_record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if mode.cut:
        raise KeepGraph
    mode.spoil_prefix()
    return func(*args, **kwargs), None


BACKWARD = Rule(_backward_record, kept_or_run, taped=False)
"""A backward pass inside the closure, for the gradient of an input."""


def _hooked_record(mode: Recording, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not torch.compiler.is_compiling() and not heard_anyway(args):
        mode.hear()
    return func(*args, **kwargs), None


def _hooked_replay(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs) if heard_anyway(args) else unheard()


HOOKED = Rule(_hooked_record, _hooked_replay, taped=False)
"""A hook on a tensor of the closure's: only in the pass that the user differentiates."""


# --- random numbers -------------------------------------------------------------------------------
# A mask is a decision of the centre's. Functions that draw one run again in every pass, from the
# same random state, and draw the same numbers as long as what they are given lies in memory as it
# did: random numbers are drawn in the order of memory. Where it does not (behind compiled code,
# say), it is laid out anew first.


def _drawn_record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    layout = layout_of(args), layout_of(tuple(kwargs.values()))
    return func(*args, **kwargs), layout


def _drawn_replay(mode: Mode, layout: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)
    own = laid_out(args, layout[0])
    named = laid_out(tuple(kwargs.values()), layout[1])
    out = func(*own, **dict(zip(kwargs, named, strict=True)))
    if isinstance(out, Tensor) and own and out is own[0] and out is not args[0]:
        return args[0].copy_(out)  # it was to overwrite its argument
    return out


DRAWN = Rule(_drawn_record, _drawn_replay, always=True)
"""It applies to constants, too: the mask of a dropout written by hand is one."""

_DATA: Any = torch.Tensor.data
OPERATORS = (
    Operator("""
        gt ge lt le eq ne __gt__ __ge__ __lt__ __le__ __eq__ __ne__ logical_not logical_and
        logical_or isnan isinf isfinite long int bool
    """, CONSTANT, elementwise),
    Operator("""
        greater greater_equal less less_equal not_equal equal allclose isclose isposinf isneginf
        signbit is_nonzero logical_xor argmax argmin argsort nonzero argwhere count_nonzero
        nonzero_static isin unique unique_consecutive searchsorted bucketize histc bincount
        matrix_rank floor_divide all any detach_copy item tolist __bool__ __float__ __int__
        __index__ short char byte __contains__ numpy __array__ tensor new_tensor
    """, CONSTANT),
    Operator("detach", ALIAS, additive),
    Operator((_DATA.__get__,), ALIAS, elementwise),
    Operator((_DATA.__set__,), ASSIGNED),
    Operator("detach_", DETACHED),
    Operator("to type_as", CAST, additive, jointly),
    Operator("type", CAST, additive),
    Operator("_to_copy", CAST),
    Operator((torch.autograd.grad,), GRADIENT),
    Operator((torch.Tensor.backward,), BACKWARD),
    Operator(tuple(REGISTER), HOOKED),
    # random numbers
    Operator("""
        dropout dropout_ dropout1d dropout2d dropout3d feature_dropout
    """, DRAWN, additive, jointly),
    Operator("alpha_dropout feature_alpha_dropout rand_like randn_like", DRAWN, elementwise),
    Operator("""
        alpha_dropout_ feature_dropout_ feature_alpha_dropout_ native_dropout randint_like uniform_
        normal_ exponential_ geometric_ cauchy_ log_normal_ random_ binomial
    """, DRAWN),
    Operator("bernoulli bernoulli_ normal poisson", LINEAR, random=True),
    Operator("multinomial", CONSTANT, random=True),
    Operator("gumbel_softmax", opened(F.gumbel_softmax)),
    Operator("_standard_gamma _sample_dirichlet", refused("has kinks")),
)  # fmt: skip

DETACH = frozenset([*named("detach to"), _DATA.__get__])
"""Functions that only take a tensor out of the graph, or cast it."""
