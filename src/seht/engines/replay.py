"""Two function modes: the centre pass records every decision, the perturbed passes replay it.

With few drawn weights (SEHT-D) most of a network comes before the first of them and is the same in
every pass. The recorder then also keeps the results of that *prefix*, and the replayer returns them
as leaves of its own graph: the prefix is computed and differentiated once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.overrides import TorchFunctionMode

from seht.engines.kinks import DETACH, KINKS, RANDOM
from seht.engines.rules import KinkError, depends
from seht.engines.state import RandomState
from seht.engines.witness import Witness, name, unrepeatable

_SWITCH = torch._C._set_grad_enabled
_SAME, _WRITTEN = object(), object()
_replaying: ContextVar[bool] = ContextVar("seht_replaying", default=False)


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


class _Mode(TorchFunctionMode):
    def __init__(self, random: RandomState, compact: bool) -> None:
        super().__init__()
        self.random = random
        self.compact = compact
        """Keep masks instead of whole outputs: less memory, where the centre's graph is gone."""
        self.constant = False
        """Inside the user's no_grad: everything is a constant to autograd."""
        self.witness: Witness | None = None
        self.depth = 0
        """How many composite functions we are inside of."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the function up; most pass."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return self._call(func, args, kwargs)
        if CompileContext.try_get() is not None:  # the compiler's own calls, not the model's
            return func(*args, **kwargs)
        if self.witness is None:
            return self._call(func, args, kwargs)
        self.witness.see(func, args, kwargs)
        out = self._call(func, args, kwargs)
        self.witness.made(func, out)
        return out

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    @contextmanager
    def inside(self) -> Iterator[None]:
        """On again, for the parts of a composite function."""
        self.depth += 1
        try:
            with self:
                yield
        finally:
            self.depth -= 1

    def state_after(self, func: Any) -> list[Tensor] | None:
        """The random state after a call that consumed some of it."""
        return self.random.read() if func in RANDOM else None

    def jump_to(self, state: list[Tensor] | None) -> None:
        """Skip the random numbers that a replayed call does not draw again."""
        if state is not None:
            self.random.write(state)


class Prefix:
    """The results of everything before the first drawn weight, as the centre computed them."""

    def __init__(self, drawn: set[int]) -> None:
        self._drawn = drawn
        self.calls: list[tuple[Any, Any]] = []
        self.closed = False
        self.decisions = 0
        self.state: list[Tensor] = []
        self._versions: list[tuple[Tensor, int]] = []

    def open_to(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call still belongs to it."""
        return not self.closed and not self._sees((*args, *kwargs.values()))

    def close(self, decisions: int, state: list[Tensor]) -> None:
        """A drawn weight was seen."""
        self.closed, self.decisions, self.state = True, decisions, state
        self._versions = [(out, out._version) for out in self.results()]

    def results(self) -> Iterator[Tensor]:
        """Every tensor that a call of the prefix returned."""
        for _, out in self.calls:
            yield from _tensors(out)

    def intact(self) -> bool:
        """Whether it was met at all, and nothing after it wrote into its results."""
        return self.closed and all(t._version == version for t, version in self._versions)

    def _sees(self, values: Any) -> bool:
        return any(
            id(v) in self._drawn if isinstance(v, Tensor) else
            isinstance(v, (tuple, list)) and self._sees(v)
            for v in values
        )  # fmt: skip


class Recorder(_Mode):
    """Runs every operation as it is and remembers what decided its outcome."""

    def __init__(
        self, random: RandomState, *, compact: bool = False, prefix: Prefix | None = None
    ) -> None:
        super().__init__(random, compact)
        self.tape: list[tuple[Any, Any]] = []
        self.prefix = prefix

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _SWITCH:
            func(*args)
            if self.constant and args[0]:
                self.tape.append((func, self.random.read()))
            self.constant = not args[0]
            return None
        if "generator" in kwargs:
            self.random.meet(kwargs["generator"])
        prefix = self.prefix
        if prefix is None or prefix.closed or self.depth or torch.compiler.is_compiling():
            return self._record(func, args, kwargs)
        if not prefix.open_to(args, kwargs):
            prefix.close(len(self.tape), self.random.read())
            return self._record(func, args, kwargs)
        out = self._record(func, args, kwargs)
        prefix.calls.append((func, out))
        return out

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.constant:
            return self._constant(func, args, kwargs)
        rule = KINKS.get(func)
        if rule is None or (rule.taped and not depends(args, kwargs)) or _idle(func):
            return func(*args, **kwargs)
        if rule.taped and not torch.is_grad_enabled():
            # The user's no_grad is handled above: this is the forward of a custom Function.
            raise KinkError(
                f"{name(func)} inside a custom autograd.Function decides something that the "
                "difference engine cannot freeze; wrap its apply with seht.register_kink, or use "
                "engine='autograd'"
            )
        out, decision = rule.record(self, func, args, kwargs)
        if rule.taped:
            self.tape.append((func, decision))
        return out

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target: Any = kwargs.get("out", args[0] if args else None)
        version = target._version if isinstance(target, Tensor) else None
        out = func(*args, **kwargs)
        if version is not None and target._version != version:
            self.tape.append((func, (_WRITTEN, (out is target, target.clone()))))
        else:
            self.tape.append((func, (_SAME if args and out is args[0] else out, None)))
        return out


class Replayer(_Mode):
    """Runs every operation with the decisions of the centre."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.random, recorder.compact)
        self._tape = recorder.tape
        self._next = 0
        self._prefix = recorder.prefix
        self._in_prefix = recorder.prefix is not None
        self._skipped = 0
        self.aliases: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity of a prefix result: the result and the leaf that stands for it."""

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _SWITCH:
            func(*args)
            if self.constant and args[0] and not self._in_prefix:
                self.random.write(self._take(func))
            self.constant = not args[0]
            return None
        if self._in_prefix and not self.depth:
            assert self._prefix is not None
            if self._skipped < len(self._prefix.calls):
                return self._skip(func)
            self._in_prefix = False
            self._next = self._prefix.decisions
            self.random.write(self._prefix.state)
        if self.constant:
            return self._constant(func, args, kwargs)
        rule = KINKS.get(func)
        if rule is None or (rule.taped and not depends(args, kwargs)) or _idle(func):
            return func(*args, **kwargs)
        decision = self._take(func) if rule.taped else None
        return rule.replay(self, decision, func, args, kwargs)

    def _skip(self, func: Any) -> Any:
        assert self._prefix is not None
        known, out = self._prefix.calls[self._skipped]
        if known != func:
            raise unrepeatable(f"it called {name(func)} where it had called {name(known)}")
        self._skipped += 1
        return self._stand_in(out)

    def _stand_in(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            if not out.requires_grad or isinstance(out, nn.Parameter):
                return out
            if id(out) not in self.aliases:
                self.aliases[id(out)] = (out, out.detach().requires_grad_())
            return self.aliases[id(out)][1]
        if isinstance(out, tuple) and any(isinstance(item, Tensor) for item in out):
            items = [self._stand_in(item) for item in out]
            return (
                type(out)(items) if type(out).__module__ == "torch.return_types" else tuple(items)
            )
        if isinstance(out, list):
            return [self._stand_in(item) for item in out]
        return out

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out, kept = self._take(func)
        if out is _SAME:
            return args[0]
        if out is not _WRITTEN:
            return out
        target: Any = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, nn.Parameter):  # a moved weight stays where it was moved to
            target.copy_(kept[1])
        return target if kept[0] else None

    def _take(self, func: Any) -> Any:
        if self._next == len(self._tape):
            raise unrepeatable(f"it decided more than before, at {name(func)}")
        known, decision = self._tape[self._next]
        if known != func:
            raise unrepeatable(f"it called {name(func)} where it had called {name(known)}")
        self._next += 1
        return decision

    def finish(self, end: list[Tensor]) -> None:
        """The cheap guards: every decision used, the random numbers those of the centre."""
        if self._next != len(self._tape):
            raise unrepeatable(f"it never came to {name(self._tape[self._next][0])} again")
        if not self.random.equals(end):
            raise unrepeatable("it drew other random numbers than before")
        if self.witness is not None:
            self.witness.finish()
            self.witness.compare_values()


def _idle(func: Any) -> bool:
    """A detach in the forward of a custom Function, where nothing is tracked anyway."""
    return func in DETACH and not torch.is_grad_enabled()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
