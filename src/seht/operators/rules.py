r"""The rules: how a decision is recorded at the centre and replayed at the perturbed weights.

The Hessian of a network ignores its kinks: the second derivative of a ReLU is 0 almost everywhere.
A finite step crosses them. So the centre pass records every decision (the side of each ReLU, the
place of each maximum, the outcome of each comparison) and the perturbed passes replay it: along
the step the network is then smooth, and has at the centre the derivatives that autograd gives it.

A rule has two functions: ``record(mode, func, args, kwargs) -> (output, decision)`` runs the
operation and says what to remember; ``replay(mode, decision, func, args, kwargs) -> output``
computes the smooth continuation. Which function follows which rule is a column of ``table.py``.
Functions may also be run by their parts (:func:`composed`), or refused (:func:`refused`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.errors import KinkError
from seht.tensors.random_state import RandomState


class KeepGraph(Exception):
    """The lean form has to keep the centre's graph, because the closure itself uses it."""


class Follower(Protocol):
    """What follows the examples of a batch from call to call (``persample/tracking.py``)."""

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Say where the examples lie in what a call returned."""


class Mode(Protocol):
    """What a rule may ask of the function mode that calls it (``replay/mode.py``)."""

    random: RandomState
    compact: bool
    """Keep masks instead of outputs."""
    sharp: bool
    """Whether losses are taken in float64 where that costs nothing."""

    @property
    def tracker(self) -> Follower | None:
        """Follows the examples, for per-sample probes."""

    def inside(self) -> AbstractContextManager[None]:
        """On again, for the parts of a composite function."""

    def state_after(self, func: Any) -> list[Tensor] | None:
        """The random state after a call that consumed some of it."""

    def jump_to(self, state: list[Tensor] | None) -> None:
        """Skip the random numbers that a replayed call does not draw again."""


class Recording(Mode, Protocol):
    """What a rule may ask of the mode in the centre pass."""

    cut: bool
    """The centre's graph before the outputs is not even made."""

    @property
    def watched(self) -> bool:
        """Whether the passes are compared."""

    def spoil_prefix(self) -> None:
        """Every pass has to run from the start, also before the first drawn weight."""

    def hear(self) -> None:
        """Note that the closure has put a hook on one of its tensors."""


Record = Callable[[Recording, Any, Any, Any], tuple[Any, Any]]
Replay = Callable[[Mode, Any, Any, Any, Any], Any]


class Rule(NamedTuple):
    """How one function is frozen."""

    record: Record
    replay: Replay
    taped: bool = True
    """False where the function itself leaves nothing to remember: its parts may."""
    always: bool = False
    """Whether it holds for constants, too."""


def untaped(run: Callable[[Mode, Any, Any, Any], Any]) -> Rule:
    """The rule of a function that decides nothing itself: ``run`` stands for it in every pass."""
    return Rule(
        lambda mode, func, args, kwargs: (run(mode, func, args, kwargs), None),
        lambda mode, decision, func, args, kwargs: run(mode, func, args, kwargs),
        taped=False,
    )


def kept_or_run(mode: Mode, decision: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Replay for what is constant only at times: the kept result, or the call where none is."""
    return func(*args, **kwargs) if decision is None else decision


def first(args: Any, kwargs: Any) -> Any:
    """The tensor an operation works on."""
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def depends(args: Any, kwargs: Any) -> bool:
    """Whether an argument may depend on the weights: constants need no freezing."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            # A tensor of torch.vmap never says that it requires a gradient.
            if value.requires_grad or (
                not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(value)
            ):
                return True
        elif isinstance(value, (tuple, list)) and depends(value, {}):
            return True
    return False


def write_back(x: Tensor, y: Tensor, in_place: bool) -> Tensor:
    """The result of an operation that may have been asked to overwrite its argument."""
    return x.copy_(y) if in_place else y


def composed(build: Callable[..., Any], when: Callable[..., bool] | None = None) -> Rule:
    """Run ``build`` instead with the mode on: its parts are frozen, each by its own rule.

    Always, or when ``when(*args, **kwargs)`` says so.
    """

    def run(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
        if when is not None and not when(*args, **kwargs):
            return func(*args, **kwargs)
        with mode.inside():
            return build(*args, **kwargs)

    return untaped(run)


def opened(function: Any) -> Rule:
    """A Python function of PyTorch, run so that the mode sees the calls inside it."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    blind = {name: (lambda *_: False) for name in asks}
    inner = types.FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return composed(inner)


def called(func: Any) -> str:
    """What to call a function in a message."""
    return getattr(func, "__name__", str(func))


def refuse(func: Any, reason: str) -> NoReturn:
    """Raise: this function has no rule."""
    raise KinkError(
        f"{called(func)} {reason}, and the difference engine has no "
        "rule to freeze it; use engine='autograd', or teach it with seht.register_kink"
    )


def refused(reason: str, when: Callable[..., bool] | None = None) -> Rule:
    """Refuse by name, always or when ``when(*args, **kwargs)`` says so."""

    def record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (when is None or when(*args, **kwargs)) and depends(args, kwargs):
            refuse(func, reason)
        return func(*args, **kwargs), None

    return Rule(record, kept_or_run, taped=False)
