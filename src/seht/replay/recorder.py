"""The function mode of the centre pass: it records every decision.

With few drawn weights (SEHT-D) most of a network comes before the first of them and is the same in
every pass. The recorder then also keeps the results of that prefix (``prefix.py``), and the
replayer returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seht.errors import KinkError
from seht.operators.constants import DETACH, offset
from seht.operators.operator import IN_PLACE
from seht.operators.rules import KeepGraph, Rule, called, first
from seht.persample import recurrent
from seht.persample.tracking import ExampleTracker
from seht.replay.followed import Aliases, Intermediates
from seht.replay.mode import PassMode, Setting, idle
from seht.replay.prefix import Prefix
from seht.replay.state import compiles
from seht.replay.witness import Witness
from seht.tensors.memory import Layout, layout_of, root_of, shares_memory, version
from seht.tensors.process import ASKED
from seht.tensors.trees import copies, tensors

SWITCH = torch._C._set_grad_enabled
ASSIGN = frozenset({torch.Tensor.data.__set__})  # type: ignore[attr-defined]


class Recorder(PassMode):
    """Runs every operation unchanged and records the decisions that it makes."""

    def __init__(
        self,
        setting: Setting,
        witness: Witness | None = None,
        *,
        heads: dict[Any, Rule] | None = None,
        lean: bool = False,
        cut: bool = False,
        prefix: Prefix | None = None,
        tracker: ExampleTracker | None = None,
        second: bool = False,
    ) -> None:
        super().__init__(setting, witness, heads, second=second)
        self.lean, self.cut = lean, cut
        """Whether the centre's graph is not kept; and its part before the outputs not even made."""
        self.hooked = False
        """Whether the closure wants to see gradients of its tensors."""
        self.tracker = tracker
        """Follows the examples, for per-sample probes."""
        self.tape: list[tuple[tuple[Any, bool], Any, bool, Layout]] = []
        """Function and whether it was frozen; decision; whether to hand out copies of it; how the
        result lies in memory.
        """
        self.asked = ASKED.get()
        self.compiles = compiles()
        # Compiled code is not replayed call by call: the centre and the others have own graphs.
        self.prefix = None if self.compiles else prefix
        self._places: dict[int, int] = {}
        """Where on the tape a tensor lies that the closure has in its hands, too."""
        self._aliases = Aliases()
        self._inner = Intermediates()
        self._weights: dict[int, nn.Parameter] = {}

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is SWITCH:
            ended = self.switch(args[0])
            func(*args)
            if ended and not self.compiles:  # a compiled part may hide it, in one pass or another
                self._remember((func, True), self.random.read())
            return None
        if "generator" in kwargs and self.meets(kwargs["generator"]):
            self.random.meet(kwargs["generator"])
        prefix = self.prefix
        if prefix is None or prefix.closed or self.depth or torch.compiler.is_compiling():
            return self._record(func, args, kwargs)
        # Within torch.vmap and its kin a result means nothing once the transform has ended.
        if not prefix.open_to(args, kwargs) or torch._C._are_functorch_transforms_active():
            prefix.close(len(self.tape), self.random.read())
            return self._record(func, args, kwargs)
        out = self._record(func, args, kwargs)
        prefix.keep(func, args, out, hidden=self.hidden())
        return out

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = self._decide(func, args, kwargs)
        tracker = self.tracker
        if tracker is not None and (func in IN_PLACE or not tracker.knows(out, args)):
            tracker.follow(func, args, kwargs, out, hidden=self.hidden())
        return out

    def _decide(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._places and func in IN_PLACE and not torch.compiler.is_compiling():
            self._spare(func, args[0])
        if func in ASSIGN and isinstance(args[0], nn.Parameter):
            return func(*args, **kwargs)  # the replayer leaves it out
        if self.frozen():
            return self._constant(func, args, kwargs)
        rule = self.rule(func)
        # The user's no_grad is handled above: this is the forward of a custom Function.
        hidden = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if rule is None or idle(rule, func, args, kwargs):
            if not hidden:
                return func(*args, **kwargs)
            if rule is None or not rule.taped or not self._inner.holds(args, kwargs):
                return self._inner.follow(args, kwargs, func(*args, **kwargs))
        if rule.taped and hidden:
            raise KinkError(
                f"{called(func)} inside a custom autograd.Function decides something that the "
                "difference engine cannot freeze; wrap its apply with seht.register_kink, or use "
                "engine='autograd'"
            )
        out, decision = rule.record(self, func, args, kwargs)
        if rule.taped:
            # A detached weight lies in the weight's own memory, and would move with it.
            alias = func in DETACH and isinstance(first(args, kwargs), nn.Parameter)
            self._remember((func, False), decision, alias, out)
            if func in DETACH and self._aliases.note(first(args, kwargs), out):
                self._places[id(out)] = len(self.tape) - 1
        return out

    def hear(self) -> None:
        """The closure wants to see gradients of its tensors, for which the graph has to be kept."""
        self.hooked = True
        if self.lean:
            raise KeepGraph

    @property
    def watched(self) -> bool:
        """Whether the passes are compared."""
        return self.witness is not None

    def spoil_prefix(self) -> None:
        """Every pass has to run from the start: a kept prefix would cut its graph short."""
        if self.prefix is not None:
            self.prefix.spoil()

    def recomputing(self) -> Callable[[], AbstractContextManager[Any]]:
        """What an activation checkpoint that is made now has to run again in.

        The centre decides as it did, at the same weights, and nobody needs to remember it.
        """
        self.spoil_prefix()  # a part of it would be missing when it runs again
        if self.tracker is not None and self.tracker.coupling == "frozen":
            raise KinkError(
                "coupling='frozen' keeps the batch statistics of each pass, and an activation "
                "checkpoint would drop them; switch checkpointing off on penalised steps"
            )
        # Recurrent layers ran step by step, and what they saved is found by its place.
        layers = None if self.layers is None else recurrent.RULES
        setting = replace(self.setting, compact=True, layers=layers)

        @contextmanager
        def again() -> Iterator[None]:
            with setting.borrowed(), Recorder(setting, second=True):
                yield

        return again

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = list(tensors((args, tuple(kwargs.values()))))
        before = [version(t) for t in given]
        target = args[0] if func in IN_PLACE and isinstance(args[0], Tensor) else None
        old = None if target is None or target.grad_fn is None else target.detach().clone()
        out = func(*args, **kwargs)
        in_place = bool(args) and (out is None or out is args[0])
        written = [
            (place, None if isinstance(t, nn.Parameter) else t.clone())
            for place, (t, known) in enumerate(zip(given, before, strict=True))
            if (in_place and place == 0 if t.is_inference() else version(t) != known)
        ]
        same = next((place for place, t in enumerate(given) if t is out), None)
        unseen = self.compiles or torch.is_inference_mode_enabled()  # the end of the block
        state = self.random.read() if unseen else None
        alias = isinstance(out, Tensor) and same is None and self._moves(args, out)
        moved = None
        if target is not None and old is not None:
            # In the middle of a graph: another value, and to autograd the old slope.
            moved = offset(target.detach(), old)
            written = [(place, v) for place, v in written if given[place] is not target]
        decision = (None if same is not None else out, same, written, moved, state)
        self._remember((func, True), decision, alias)
        return out

    def _moves(self, args: Any, out: Tensor) -> bool:
        """Whether a constant lies in the memory of a weight."""
        weights = [a for a in args if isinstance(a, nn.Parameter) and a.requires_grad]
        self._weights.update({id(w): w for w in weights})
        return any(shares_memory(w, out) for w in self._weights.values())

    def _remember(
        self, call: tuple[Any, bool], decision: Any, copy: bool = False, out: Any = None
    ) -> None:
        place = len(self.tape)
        kept = copies(decision) if copy else decision
        self.tape.append((call, kept, copy, layout_of(out)))
        if not copy and not torch.compiler.is_compiling():
            for tensor in tensors(decision):
                self._places[id(tensor)] = place

    def _spare(self, func: Any, target: Any) -> None:
        """A tensor on the tape is about to be overwritten: keep it as it is now."""
        if not isinstance(target, Tensor):
            return
        self._aliases.refuse_write(func, target)
        for tensor in (target, root_of(target)):
            place = self._places.pop(id(tensor), None)
            if place is not None:
                call, decision, _, layout = self.tape[place]
                self.tape[place] = (call, copies(decision), True, layout)
