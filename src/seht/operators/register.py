"""Rules for operations that the table cannot know: the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from seht.operators.composed import refused
from seht.operators.constants import CONSTANT
from seht.operators.pieces import LINEAR
from seht.operators.rules import Rule
from seht.operators.table import KINKS


def register_kink(function: Callable[..., Any], rule: Any = "constant") -> Callable[..., Any]:
    """Teach the difference engine a user's own operation; returns what to call instead of it.

    ``rule`` says what holds at the recorded decision:

    - ``"linear"``: piecewise linear in its tensor arguments;
    - ``"constant"``: autograd holds the result constant;
    - ``"smooth"``: no kink at all, for an operation that would be refused;
    - a pair ``(record, replay)``: ``record(*args, **kwargs) -> (output, decision)`` at the centre,
      ``replay(decision, *args, **kwargs) -> output`` at the perturbed weights.

    Functions of PyTorch are registered as they are. Anything else (a Python function, the
    ``apply`` of an ``autograd.Function``) is wrapped, because PyTorch would not show the call.

    Example:
        ```python
        class Clip(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x < 1)
                return x.clamp(max=1)

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.saved_tensors[0]


        clip = seht.register_kink(Clip.apply, "linear")  # call clip from now on
        ```
    """
    named = {"linear": LINEAR, "constant": CONSTANT, "smooth": refused("", lambda *_, **__: False)}
    if isinstance(rule, str):
        if rule not in named:
            raise ValueError(f"unknown rule {rule!r} (known: {', '.join(named)}, or a pair)")
        chosen = named[rule]
    elif isinstance(rule, tuple) and len(rule) == 2 and all(map(callable, rule)):
        chosen = _users_rule(*rule)
    else:
        raise TypeError(f"rule must be a name or a pair (record, replay), not {rule!r}")
    if not callable(function):
        raise TypeError(f"function must be callable, not {type(function).__name__}")
    if function in KINKS or function in _overridable():
        KINKS[function] = chosen
        return function

    def visible(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(visible, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    visible.__name__ = getattr(function, "__name__", "operation")
    visible.__doc__ = function.__doc__
    KINKS[visible] = chosen
    return visible


def _users_rule(record: Callable[..., Any], replay: Callable[..., Any]) -> Rule:
    return Rule(
        lambda mode, func, args, kwargs: record(*args, **kwargs),
        lambda mode, decision, func, args, kwargs: replay(decision, *args, **kwargs),
    )


def _overridable() -> set[Any]:
    from torch.overrides import get_testing_overrides

    return set(get_testing_overrides())
