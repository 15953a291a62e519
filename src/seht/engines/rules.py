r"""How a decision is recorded at the centre and replayed at the perturbed weights.

The Hessian of a network ignores its kinks: the second derivative of a ReLU is 0 almost everywhere.
A finite step crosses them. So the centre pass records every decision (the side of each ReLU, the
place of each maximum, the outcome of each comparison) and the perturbed passes replay it: along
the step the network is then smooth, and has at the centre the derivatives that autograd gives it.

A rule has two functions: ``record(mode, func, args, kwargs) -> (output, decision)`` runs the
operation and says what to remember; ``replay(mode, decision, func, args, kwargs) -> output``
computes the smooth continuation. The table of which function follows which rule is in ``kinks.py``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

try:
    import numpy
except ImportError:  # PyTorch does without it
    numpy = None  # type: ignore[assignment]

Record = Callable[[TorchFunctionMode, Any, Any, Any], tuple[Any, Any]]
Replay = Callable[[TorchFunctionMode, Any, Any, Any, Any], Any]


class KinkError(RuntimeError):
    """An operation has a kink that the difference engine cannot freeze."""


class KeepGraph(Exception):
    """The lean form has to keep the centre's graph, because the closure itself uses it."""


class Rule(NamedTuple):
    """How one function is frozen."""

    record: Record
    replay: Replay
    taped: bool = True
    """False where the function itself leaves nothing to remember: its parts may."""


class Dropped:
    """Whether what autograd saves for a backward pass is dropped at the moment."""

    def __init__(self) -> None:
        self.on = True


@contextmanager
def dropping() -> Iterator[Dropped]:
    """Nothing is kept for a backward pass in the block: the graph says who depends on whom, and
    no more. Where a rule needs a derivative it asks for :func:`kept_graph`.
    """
    state = Dropped()

    def pack(tensor: Tensor) -> Tensor | None:
        return None if state.on else tensor

    def unpack(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise RuntimeError(
                "a gradient was asked for inside a closure that is measured without a graph; "
                "take it outside, or measure with per_layer=True, which keeps the graph"
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield state


@contextmanager
def kept_graph() -> Iterator[None]:
    """An ordinary graph in the block, whatever surrounds it."""
    if torch.compiler.is_compiling():
        with torch.enable_grad():
            yield
    else:
        same = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
        with torch.enable_grad(), same:
            yield


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def first(args: Any, kwargs: Any) -> Any:
    """The tensor an operation works on."""
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def depends(args: Any, kwargs: Any) -> bool:
    """Whether an argument may depend on the weights: constants need no freezing."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (tuple, list)) and depends(value, {}):
            return True
    return False


def _write_back(x: Tensor, y: Tensor, in_place: bool) -> Tensor:
    return x.copy_(y) if in_place else y


# --- relu: the one that must be as fast as the operation itself ---------------------------------


def _relu_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    x = first(args, kwargs)
    y = func(*args, **kwargs)
    if mode.packed and numpy is not None and y.device.type == "cpu":
        return y, (y is x, "bits", numpy.packbits((y.detach() > 0).numpy().reshape(-1)), y.shape)
    if y is x or mode.compact:
        return y, (y is x, True, (y.detach() > 0).view(torch.int8), None)
    # A compiler cannot trace version counters, and needs no such check: it has no in-place writes.
    version = None if torch.compiler.is_compiling() else y._version
    return y, (False, False, y.detach(), version)


def _relu_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    x, (in_place, masked, kept, version) = first(args, kwargs), decision
    if masked == "bits":
        flat = numpy.unpackbits(kept, count=version.numel())
        kept = torch.from_numpy(flat).view(version)
    if masked:
        return x.mul_(kept) if in_place else x * kept
    if version is not None and kept._version != version:
        raise KinkError(
            "the output of relu was overwritten in place after it was computed, which autograd "
            "refuses too; use an out-of-place operation there"
        )
    # x where the centre's output is positive, else 0: a fused form of x * mask.
    return torch.ops.aten.threshold_backward(x, kept, 0)


RELU = Rule(_relu_record, _relu_replay)


# --- piecewise linear functions: f(x) = sum_i a_i x_i + b on the piece of the centre -------------


def _slots(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    items = (*enumerate(args), *kwargs.items())
    return [(k, v) for k, v in items if isinstance(v, Tensor) and v.is_floating_point()]


def _linear_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    slots = _slots(args, kwargs)
    if not slots:  # the modulus or the sign of complex numbers is smooth
        return func(*args, **kwargs), None
    shape = torch.broadcast_shapes(*(v.shape for _, v in slots))
    leaves = {k: v.detach().expand(shape).clone().requires_grad_() for k, v in slots}
    with kept_graph(), mode.random.kept():
        # The clones keep an in-place operation from writing into the leaves.
        y = func(
            *[leaves[i].clone() if i in leaves else a for i, a in enumerate(args)],
            **{k: leaves[k].clone() if k in leaves else v for k, v in kwargs.items()},
        )
        slopes = torch.autograd.grad(
            y, list(leaves.values()), torch.ones_like(y), materialize_grads=True
        )
    rest = y.detach()
    for slope, leaf in zip(slopes, leaves.values(), strict=True):
        rest = rest - (slope * leaf.detach()).masked_fill(slope == 0, 0)
    rest = rest.masked_fill_(rest.isnan(), 0)  # where an infinite input passes through
    out = func(*args, **kwargs)
    return out, (out is first(args, kwargs), slopes, rest, mode.state_after(func))


def _linear_replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if decision is None:
        return func(*args, **kwargs)
    in_place, slopes, rest, state = decision
    y = rest
    for slope, (_, x) in zip(slopes, _slots(args, kwargs), strict=True):
        # An infinite input on a flat piece must not become 0 * inf.
        y = y + (slope * x).masked_fill(slope == 0, 0)
    mode.jump_to(state)
    return _write_back(first(args, kwargs), y, in_place)


LINEAR = Rule(_linear_record, _linear_replay)


# --- a smooth formula on each side ----------------------------------------------------------------


def sided(formula: Callable[..., Tensor]) -> Rule:
    """``formula(positive, x, ...)`` with ``positive`` the recorded side, x > 0."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x = first(args, kwargs)
        side = x.detach() > 0
        out = func(*args, **kwargs)
        return out, (out is x, side)

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        in_place, side = decision
        named = {k: v for k, v in kwargs.items() if k not in ("inplace", "input", "self")}
        return _write_back(
            first(args, kwargs), formula(side, first(args, kwargs), *args[1:], **named), in_place
        )

    return Rule(record, replay)


# --- places: maxima, order statistics, pools ------------------------------------------------------


def indexed(dim_at: int, *, default: int | None = -1) -> Rule:
    """Operations that return ``(values, indices)`` along a dimension (the argument ``dim_at``)."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):  # max(x) or max(x, y)
            rule = LINEAR if len(_slots(args, kwargs)) > 1 else REDUCED
            out, decision = rule.record(mode, func, args, kwargs)
            return out, (rule, decision)
        return out, (None, out[1])

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        rule, index = decision
        if rule is not None:
            return rule.replay(mode, index, func, args, kwargs)
        dim = kwargs.get("dim", args[dim_at] if len(args) > dim_at else default)
        x = first(args, kwargs)
        if x.dim() == 0:
            return type_of(func)((x.clone(), index))
        flat = index.dim() < x.dim()
        values = x.gather(dim, index.unsqueeze(dim) if flat else index)
        return type_of(func)((values.squeeze(dim) if flat else values, index))

    def type_of(func: Any) -> Callable[[Any], Any]:
        return getattr(torch.return_types, func.__name__, tuple)

    return Rule(record, replay)


def _reduced_record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    leaf = first(args, kwargs).detach().clone().requires_grad_()
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "self")}
    with kept_graph():
        y = func(leaf, *args[1:], **rest)
        # Each entry belongs to one output, and ties are shared as autograd shares them.
        (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    return func(*args, **kwargs), slope


def _reduced_replay(mode: Any, slope: Any, func: Any, args: Any, kwargs: Any) -> Any:
    x = first(args, kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else ())
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    product = slope * x
    return product.sum(dim, keepdim=keep) if dim != () else product.sum()


REDUCED = Rule(_reduced_record, _reduced_replay)


def pooled(with_indices: Any, spatial: int, *, options: int, pair: bool = False) -> Rule:
    """Max-pooling over ``spatial`` axes; ``options`` positional arguments before return_indices."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        named = {k: v for k, v in kwargs.items() if k != "return_indices"}
        out, index = with_indices(*args[:options], **named)
        return ((out, index) if pair else out), (index, mode.state_after(func))

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        index, state = decision
        flat = first(args, kwargs).flatten(-spatial).gather(-1, index.flatten(-spatial))
        mode.jump_to(state)
        return (flat.view(index.shape), index) if pair else flat.view(index.shape)

    return Rule(record, replay)


# --- functions made of others ---------------------------------------------------------------------


def composed(build: Callable[..., Any]) -> Rule:
    """Run ``build`` instead with the mode on: its parts are frozen, each by its own rule."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with mode.inside():
            return build(*args, **kwargs), None

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return record(mode, func, args, kwargs)[0]

    return Rule(record, replay, taped=False)


def opened(function: Any) -> Rule:
    """A Python function of PyTorch, run so that the mode sees the calls inside it."""
    blind = {
        name: (lambda *_: False)
        for name in (
            "has_torch_function",
            "has_torch_function_unary",
            "has_torch_function_variadic",
        )
    }
    inner = types.FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return composed(inner)


def refused(reason: str, when: Callable[..., bool] | None = None) -> Rule:
    """Refuse by name, always or when ``when(*args, **kwargs)`` says so."""

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (when is None or when(*args, **kwargs)) and depends(args, kwargs):
            raise KinkError(
                f"{getattr(func, '__name__', func)} {reason}, and the difference engine has no "
                "rule to freeze it; use engine='autograd', or teach it with seht.register_kink"
            )
        return func(*args, **kwargs), None

    def replay(mode: Any, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return Rule(record, replay, taped=False)
