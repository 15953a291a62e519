"""Two function modes: the centre pass records every decision, the perturbed passes replay it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seht.engines.kinks import KINKS, RANDOM
from seht.engines.rules import KinkError, depends
from seht.engines.state import RandomState

_SWITCH = torch._C._set_grad_enabled
_SAME, _WRITTEN = object(), object()
_replaying: ContextVar[bool] = ContextVar("seht_replaying", default=False)


class UnrepeatableError(RuntimeError):
    """The closure did something else when it ran again."""


def replaying() -> bool:
    """True in the extra runs of a closure: skip prints and metrics there."""
    return _replaying.get()


@contextmanager
def extra_run() -> Iterator[None]:
    """Mark the block as an extra run of the closure."""
    token = _replaying.set(True)
    try:
        yield
    finally:
        _replaying.reset(token)


def unrepeatable(what: str) -> UnrepeatableError:
    """The error, with what to do about it."""
    return UnrepeatableError(
        f"the closure cannot be repeated: {what}. It runs several times in a penalised step and must "
        "compute the same loss each time: draw the batch and read hidden states before it, return "
        "new states as aux, and use torch's own random numbers"
    )


class _Mode(TorchFunctionMode):
    def __init__(self, random: RandomState, compact: bool) -> None:
        super().__init__()
        self.random = random
        self.compact = compact
        """Keep masks instead of whole outputs: less memory, and safe from in-place writes."""
        self.constant = False
        """Inside the user's no_grad: everything is a constant to autograd."""

    def state_after(self, func: Any) -> list[Tensor] | None:
        """The random state after a call that consumed some of it."""
        return self.random.read() if func in RANDOM else None

    def jump_to(self, state: list[Tensor] | None) -> None:
        """Skip the random numbers that a replayed call does not draw again."""
        if state is not None:
            self.random.write(state)


class Recorder(_Mode):
    """Runs every operation as it is and remembers what decided its outcome."""

    def __init__(self, random: RandomState, *, compact: bool = False) -> None:
        super().__init__(random, compact)
        self.tape: list[tuple[Any, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the function up; most pass."""
        kwargs = kwargs or {}
        if func is _SWITCH:
            return self._switch(func, args)
        if self.constant:
            return self._constant(func, args, kwargs)
        rule = KINKS.get(func)
        if rule is None or (rule.taped and not depends(args, kwargs)):
            return func(*args, **kwargs)
        if rule.taped and not torch.is_grad_enabled():
            # The user's no_grad is handled above: this is the forward of a custom Function.
            raise KinkError(
                f"{getattr(func, '__name__', func)} inside a custom autograd.Function decides "
                "something that the difference engine cannot freeze; wrap its apply with "
                "seht.register_kink, or use engine='autograd'"
            )
        out, decision = rule.record(self, func, args, kwargs)
        if rule.taped:
            self.tape.append((func, decision))
        return out

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target = kwargs.get("out", args[0] if args else None)
        version = target._version if isinstance(target, Tensor) else None
        out = func(*args, **kwargs)
        if version is not None and target._version != version:
            kept = (out is target, target.clone())
            self.tape.append((func, (_WRITTEN, kept)))
        else:
            self.tape.append((func, (_SAME if args and out is args[0] else out, None)))
        return out

    def _switch(self, func: Any, args: Any) -> Any:
        func(*args)
        if self.constant and args[0]:
            self.tape.append((func, self.random.read()))
        self.constant = not args[0]


class Replayer(_Mode):
    """Runs every operation with the decisions of the centre."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.random, recorder.compact)
        self._tape = recorder.tape
        self._next = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the function up; what was recorded is replayed."""
        kwargs = kwargs or {}
        if func is _SWITCH:
            func(*args)
            if self.constant and args[0]:
                self.random.write(self._take(func))
            self.constant = not args[0]
            return None
        if self.constant:
            return self._constant(func, args, kwargs)
        rule = KINKS.get(func)
        if rule is None or (rule.taped and not depends(args, kwargs)):
            return func(*args, **kwargs)
        decision = self._take(func) if rule.taped else None
        return rule.replay(self, decision, func, args, kwargs)

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out, kept = self._take(func)
        if out is _SAME:
            return args[0]
        if out is not _WRITTEN:
            return out
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, nn.Parameter):  # a moved weight stays where it was moved to
            target.copy_(kept[1])
        return target if kept[0] else None

    def _take(self, func: Any) -> Any:
        if self._next == len(self._tape):
            raise unrepeatable(f"it decided more than before, at {_name(func)}")
        known, decision = self._tape[self._next]
        if known != func:
            raise unrepeatable(f"it called {_name(func)} where it had called {_name(known)}")
        self._next += 1
        return decision

    def finish(self, end: list[Tensor]) -> None:
        """The cheap guards: every decision used, the random numbers those of the centre."""
        if self._next != len(self._tape):
            raise unrepeatable(f"it never came to {_name(self._tape[self._next][0])} again")
        if not self.random.equals(end):
            raise unrepeatable("it drew other random numbers than before")


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
