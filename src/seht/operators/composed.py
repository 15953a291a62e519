"""Rules for functions that are run by their parts, and for functions that are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

from seht.errors import KinkError
from seht.operators.rules import Mode, Rule, depends, kept_or_run, untaped


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


def refuse(func: Any, reason: str) -> NoReturn:
    """Raise: this function has no rule."""
    raise KinkError(
        f"{getattr(func, '__name__', func)} {reason}, and the difference engine has no "
        "rule to freeze it; use engine='autograd', or teach it with seht.register_kink"
    )


def refused(reason: str, when: Callable[..., bool] | None = None) -> Rule:
    """Refuse by name, always or when ``when(*args, **kwargs)`` says so."""

    def record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (when is None or when(*args, **kwargs)) and depends(args, kwargs):
            refuse(func, reason)
        return func(*args, **kwargs), None

    return Rule(record, kept_or_run, taped=False)
