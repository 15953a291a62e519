"""The function mode of the perturbed passes: they replay what the centre recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from seht.operators.rules import Rule, called
from seht.persample.signs import Signs
from seht.replay.mode import PassMode, idle, meet_again
from seht.replay.prefix import Prefix
from seht.replay.recorder import ASSIGN, SWITCH, Recorder
from seht.replay.witness import Witness, unrepeatable
from seht.tensors.memory import Layout, laid_out
from seht.tensors.process import ASKED, REPLAYING
from seht.tensors.trees import StandIns, alike, copies, tensors


def replaying() -> bool:
    """True in the extra runs of a closure at w ± e s: skip prints and metrics there.

    In a penalised step the closure runs once at your weights w and again at moved ones; only the
    first run is yours to log. Outside a penalised step it is False. The call costs nothing.

    Example:
        ```python
        def closure():
            logits = model(x)
            if not seht.replaying():
                print(logits.argmax(1)[:3])
            return F.cross_entropy(logits, y)


        penalty(closure)
        ```
    """
    ASKED.set(ASKED.get() + 1)  # a closure that asks may leave something out
    return REPLAYING.get()


def in_extra_run() -> bool:
    """The same for our own use: it is not counted as a question of the closure."""
    return REPLAYING.get()


class extra_run:
    """Mark the block as an extra run of the closure."""

    def __enter__(self) -> None:
        self._token = REPLAYING.set(True)

    def __exit__(self, *_: object) -> None:
        REPLAYING.reset(self._token)


class Replayer(PassMode):
    """Runs every operation with the decisions of the centre."""

    tracker = None

    def __init__(
        self,
        recorder: Recorder,
        witness: Witness | None,
        heads: dict[Any, Rule] | None,
        *,
        prefix: Prefix | None,
        stand_ins: StandIns,
        signs: Signs | None,
    ) -> None:
        super().__init__(recorder.setting, witness, heads)
        self.signs = signs
        """The probes of the examples, and how far this pass goes along them."""
        self._tape = recorder.tape
        self._next = 0
        self._used: list[int] = []
        self._compiles = recorder.compiles
        self.lenient = ASKED.get() != recorder.asked
        self._prefix = None if self.lenient else prefix
        self._in_prefix = self._prefix is not None
        self._skipped = 0
        self.stand_ins = stand_ins
        """The stand-ins for the results of the prefix, shared by the passes."""

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is SWITCH:
            ended = self.switch(args[0])
            func(*args)
            if ended and not self._in_prefix and not self._compiles:
                self.random.write(self._take(func, True)[0])
            return None
        if "generator" in kwargs and self.meets(kwargs["generator"]):
            meet_again(self.random, kwargs["generator"])
        if func in ASSIGN and isinstance(args[0], nn.Parameter):
            return None  # a moved weight stays where it was moved to
        if self._in_prefix and not self.depth:
            assert self._prefix is not None
            if self._skipped < len(self._prefix.calls):
                return self._skip(func)
            self._in_prefix = False
            self._next = self._prefix.decisions
            self.random.write(self._prefix.state)
        if self.frozen():
            return self._constant(func, args, kwargs)
        rule = self.rule(func)
        if rule is None or idle(rule, func, args, kwargs):
            return func(*args, **kwargs)
        if not rule.taped:
            return rule.replay(self, None, func, args, kwargs)
        decision, layout = self._take(func, False)
        return laid_out(rule.replay(self, decision, func, args, kwargs), layout)

    def recomputing(self) -> Callable[[], AbstractContextManager[Any]]:
        """The mode that a checkpoint made now must be recomputed in, with its decisions."""
        start = copy.copy(self)

        @contextmanager
        def again() -> Iterator[None]:
            mode = copy.copy(start)
            mode._used, mode.witness, mode.second = [], None, True
            with mode.setting.borrowed(), mode, extra_run():
                yield

        return again

    def _skip(self, func: Any) -> Any:
        assert self._prefix is not None
        known = self._prefix.calls[self._skipped][0]
        if known != func:
            raise unrepeatable(f"it called {called(func)} where it had called {called(known)}")
        self._skipped += 1
        return self._prefix.again(self._skipped - 1, self.stand_ins)

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        (out, same, written, moved, state), _ = self._take(func, True)
        if moved is not None:
            args[0].add_(moved)
        given = list(tensors((args, tuple(kwargs.values())))) if written or same is not None else []
        for place, value in written:
            if value is not None:  # a moved weight stays where it was moved to
                given[place].copy_(value)
        self.jump_to(state)
        return out if same is None else given[same]

    def _take(self, func: Any, frozen: bool) -> tuple[Any, Layout]:
        call = (func, frozen)
        self._leave_out(call)
        if self._next == len(self._tape):
            raise unrepeatable(f"it decided more than before, at {called(func)}")
        known, decision, copy, layout = self._tape[self._next]
        if known != call:
            raise unrepeatable(f"it called {called(func)} where it had called {called(known[0])}")
        self._used.append(self._next)
        self._next += 1
        return (copies(decision) if copy else decision), layout

    def _leave_out(self, until: tuple[Any, bool] | None) -> None:
        """If the closure may have skipped a metric: its decisions are not needed."""
        while self.lenient and self._next < len(self._tape) and self._tape[self._next][0] != until:
            self._next += 1

    def finish(self, end: list[Tensor]) -> None:
        """Cheap checks at the end: all decisions were used, random numbers were the centre's."""
        if self._in_prefix:
            raise unrepeatable("it ended earlier than before")
        self._leave_out(None)
        if self._next != len(self._tape):
            raise unrepeatable(f"it never came to {called(self._tape[self._next][0][0])} again")
        for used, after in pairwise([*self._used, len(self._tape)] if self.lenient else ()):
            known = self._tape[used][0]
            if any(
                self._tape[place][0] == known
                and not alike(self._tape[place][1], self._tape[used][1])
                for place in range(used + 1, after)
            ):
                raise unrepeatable(
                    f"it left out one {called(known[0])} and not another, and nothing tells which; "
                    "return what a metric needs as aux instead of asking seht.replaying()"
                )
        if not self.random.equals(end):
            raise unrepeatable("it drew other random numbers than before")
        if self.witness is not None:
            self.witness.finish(lenient=self.lenient)
