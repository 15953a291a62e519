"""Rules for operations that the table cannot know: the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import get_testing_overrides, wrap_torch_function

from seht.operators.constants import CONSTANT
from seht.operators.pieces import USERS_LINEAR
from seht.operators.rules import Rule, refused
from seht.operators.table import KINKS


def register_kink(function: Callable[..., Any], rule: Any = "constant") -> Callable[..., Any]:
    """Tell the difference engine how to freeze an operation of your own.

    The engine runs the model at w and at w ± e s, and needs an operation to take the same decisions
    (a side of a kink, the place of a maximum) in all of them. Returns the function to call from now
    on: a PyTorch function is returned as it is; anything else (a Python function, the ``apply`` of
    an ``autograd.Function``) is wrapped, because PyTorch does not show such calls to the engine.

    Cost: none on plain steps. With ``"linear"``, a penalised step also takes the operation's
    gradient at w.

    Args:
        function: the operation.
        rule: how its result depends on its arguments once the decisions are fixed:

            - ``"linear"``: piecewise linear, entry by entry: each entry of the result depends only
              on the same entry of the (broadcast) tensor arguments;
            - ``"constant"``: autograd holds the result constant;
            - ``"smooth"``: it has no kink, and need not be refused;
            - a pair ``(record, replay)``: ``record(*args, **kwargs) -> (output, decision)`` runs at
              w, ``replay(decision, *args, **kwargs) -> output`` at the perturbed weights.

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
    named = {
        "linear": USERS_LINEAR,
        "constant": CONSTANT,
        "smooth": refused("", lambda *_, **__: False),
    }
    if isinstance(rule, str):
        if rule not in named:
            raise ValueError(f"unknown rule {rule!r} (known: {', '.join(named)}, or a pair)")
        chosen = named[rule]
    elif isinstance(rule, tuple) and len(rule) == 2 and all(map(callable, rule)):
        record, replay = rule
        chosen = Rule(
            lambda mode, func, args, kwargs: record(*args, **kwargs),
            lambda mode, decision, func, args, kwargs: replay(decision, *args, **kwargs),
        )
    else:
        raise TypeError(f"rule must be a name or a pair (record, replay), not {rule!r}")
    if not callable(function):
        raise TypeError(f"function must be callable, not {type(function).__name__}")
    if function in KINKS or function in get_testing_overrides():
        KINKS[function] = chosen
        return function

    @wrap_torch_function(lambda *args, **kwargs: [*args, *kwargs.values()])
    def visible(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    visible.__name__ = getattr(function, "__name__", "operation")
    visible.__doc__ = function.__doc__
    KINKS[visible] = chosen
    return visible
