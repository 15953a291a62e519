"""The function modes: the base class of the one that records and the one that replays, and a simple
one for a pass that does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from seht.errors import ExampleError
from seht.operators.constants import DETACH
from seht.operators.operator import METADATA
from seht.operators.rules import Rule, depends
from seht.operators.table import KINKS, RANDOM, SHARP
from seht.persample.errors import COMPILED
from seht.precision.half_weights import mixed, wide, widened
from seht.precision.policy import DEVICES, Precision, any_autocast
from seht.replay.witness import Witness, unrepeatable
from seht.tensors.random_state import RandomState
from seht.tensors.undo import break_in

_VIEWS = torch._C._set_view_replay_enabled


@dataclass(frozen=True)
class Setting:
    """The settings that are the same in all passes of an estimate."""

    random: RandomState
    precision: Precision
    borrowed: Callable[[], AbstractContextManager[Any]]
    """The context for a part that a checkpoint recomputes: it has other buffers."""
    compact: bool
    """Keep masks instead of outputs."""
    sharp: bool
    """Whether losses are taken in float64 where that costs nothing (``operators/losses.py``)."""
    layers: dict[Any, Rule] | None
    """The per-sample rules of layers, where every example has a probe of its own."""


class PassMode(TorchFunctionMode):
    """Looks every call of a closure up, and keeps track of where in the closure it comes from."""

    lenient = False
    """Whether the closure may leave something out (it asks :func:`seht.replaying`)."""

    def __init__(
        self,
        setting: Setting,
        witness: Witness | None = None,
        heads: dict[Any, Rule] | None = None,
        *,
        second: bool = False,
    ) -> None:
        super().__init__()
        self.setting = setting
        self.random, self.compact = setting.random, setting.compact  # what rules ask for
        self.precision = setting.precision
        self.layers, self.sharp = setting.layers, setting.sharp
        self.heads = heads or {}
        """How large logits and their losses are treated (``curvature/head_rules.py``)."""
        self.witness = witness
        self.second = second
        """Whether an activation checkpoint runs its part again."""
        self.constant = False
        """Inside the user's no_grad: everything is a constant to autograd."""
        self._compiled = False
        self._opened = False
        """Inside an enable_grad in the forward of a custom Function."""
        self.depth = 0
        """How many composite functions we are inside of."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the function up; most pass."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                # A no_grad of the user's or a custom Function, which look the same in a trace.
                torch._dynamo.graph_break()
            if func is checkpoint:  # traced as a whole, without a look at what is inside
                torch._dynamo.graph_break()
            return self._traced(func, args, kwargs)
        break_in()
        if any_autocast():
            self.precision.meet()
        if func in METADATA:
            out = func(*args, **kwargs)
            return wide(out) if self.precision.widens else out
        if CompileContext.try_get() is not None:  # the compiler's own calls, not the model's
            return func(*args, **kwargs)
        if func is _VIEWS:  # how compiled code begins and ends: its decisions are traced into it
            self._compiled = args[0]
            if self.layers is not None:
                raise ExampleError(COMPILED)
            if self.witness is not None:
                self.witness.lose_sight()
        if self._compiled or func is _VIEWS:
            return func(*args, **kwargs)
        if self.precision.widens:
            func, args, kwargs = widened(func, args, kwargs)
        if self.witness is None or self.depth:  # the composite as a whole has been looked at
            return self._call(func, args, kwargs)
        self.witness.see(func, args, kwargs, frozen=self.frozen(), lenient=self.lenient)
        out = self._call(func, args, kwargs)
        self.witness.made(func, args, out)
        return out

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _traced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that is being compiled: what autocast does to it is traced, too."""
        for kind in DEVICES:
            if torch.is_autocast_enabled(kind):
                if self.precision.native:
                    self.precision.note(torch.get_autocast_dtype(kind))
                else:
                    with torch.autocast(kind, enabled=False):
                        return self._traced(func, args, kwargs)
        if self.precision.widens or (not self.precision.native and mixed(func, args, kwargs)):
            func, args, kwargs = widened(func, args, kwargs)
        return self._call(func, args, kwargs)

    def meets(self, generator: torch.Generator | None) -> bool:
        """Whether the call draws from a random generator of the closure's own."""
        if generator is not None and self.second:
            raise RuntimeError(
                "the closure draws from a generator of its own inside an activation checkpoint, "
                "which draws other numbers when it runs again, in plain training too; draw them "
                "before the checkpoint, or use torch's global generator"
            )
        return generator is not None

    def rule(self, func: Any) -> Rule | None:
        """How a function is recorded and replayed; None where it runs as it is."""
        if self.layers is not None and func in self.layers:
            return self.layers[func]
        if func in self.heads and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self.heads[func]
        if self.sharp and func in SHARP:
            return SHARP[func]
        return KINKS.get(func)

    def frozen(self) -> bool:
        """Whether autograd tracks nothing here, because the user said so."""
        if self.constant:
            return True
        return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()

    def hidden(self) -> bool:
        """Whether this is the forward of a custom Function, which is not tracked either."""
        return not torch.is_grad_enabled() and not self.frozen()

    def switch(self, on: bool) -> bool:
        """Follow the user's no_grad; whether a stretch of constants ends here."""
        if self._opened or self.hidden():  # a Function switches off unseen, and on again
            self._opened = on
            return False
        ended, self.constant = self.constant and on, not on
        return ended

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


def idle(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function runs as it is although it has a rule: of constants, and what decides
    nothing in the forward of a custom Function, where nothing is tracked anyway.
    """
    if rule.taped and not rule.always and not depends(args, kwargs):
        return True
    return (rule.always or func in DETACH) and not torch.is_grad_enabled()


class Casts(TorchFunctionMode):
    """Keeps a pass to its precision where no other mode of ours looks at each call.

    ``meet`` is told of random generators of the closure's own; a checkpoint that is made inside is
    computed again in the contexts ``again``.
    """

    def __init__(
        self,
        precision: Precision,
        *again: Callable[[], AbstractContextManager[Any]],
        meet: Callable[[torch.Generator], None] | None = None,
    ) -> None:
        super().__init__()
        self._precision, self._again, self._meet = precision, again, meet

    def recomputing(self) -> Callable[[], AbstractContextManager[None]]:
        """The modes that a checkpoint made now must be recomputed in."""

        @contextmanager
        def again() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(Casts(self._precision, *self._again))
                for surroundings in self._again:
                    stack.enter_context(surroundings())
                yield

        return again

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Switch autocast off and widen what is in half precision."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            break_in()
            self._precision.meet()
            if self._precision.widens:
                func, args, kwargs = widened(func, args, kwargs)
        if self._meet is not None and kwargs.get("generator") is not None:
            self._meet(kwargs["generator"])
        out = func(*args, **kwargs)
        return wide(out) if self._precision.widens and isinstance(out, torch.dtype) else out


def meet_again(random: RandomState, generator: torch.Generator) -> None:
    """A later pass meets a generator of the closure's own, which has to start as it had."""
    if not random.meet_again(generator):
        raise unrepeatable("a random generator of its own did not start where it had")


def _leave_alone(function: Any, *, calls: bool = True) -> None:
    """Keep ``torch.compile`` from compiling a handler by itself, call by call.

    Where a model is compiled, its handlers are traced into its graph, which this does not touch;
    where a part of it runs uncompiled (a graph break), they must do so, too. Without ``calls``
    what they call may still be compiled.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        rest = skip if calls else frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, rest)
        frames.set_code_exec_strategy(function.__code__, strategy)


_leave_alone(PassMode.__torch_function__)
_leave_alone(Casts.__torch_function__)
