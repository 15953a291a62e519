"""How strongly a step is penalised: the schedule, the weight, and looks at gradients for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from seht.distributed import Ranks
from seht.errors import warn
from seht.strength import held_out as held
from seht.strength.arguments import OpenWeight
from seht.strength.products import (
    HELD_OUT,
    LOSS,
    TRACE,
    Preconditioner,
    Seen,
    Vector,
    gradient,
    trainable,
)
from seht.strength.schedule import Schedule
from seht.strength.tuned_weight import TunedWeight
from seht.strength.tuning import Tuning
from seht.strength.weight import Weight
from seht.task import Closure, Estimate, Task

_MISSING = (
    "weight='tuned' needs held-out data: penalty(closure, held_out=lambda: "
    "loss_fn(model(xv), yv)), or held_out=(batches, loss_fn) when it is made (in Lightning "
    "SehtCallback(held_out=), in Hugging Face SehtTrainer(held_out=))"
)


@dataclass(frozen=True)
class Dose:
    """The weight of one call, and which gradients to look at."""

    weight: float
    """The weight to apply, ``ramp`` and ``every`` included."""
    base: float
    """The weight before these; 0 if the training has no penalty at all."""
    most: float | None
    """A trace larger than this counts as if it were this large."""
    look: frozenset[str]
    """Which gradients to look at."""
    steady: bool
    """Whether the weight has stopped growing."""
    given: bool
    """Whether the user gave a number; false for a share, a tuned weight and a path."""
    held_out: Closure | None = None

    @property
    def penalised(self) -> bool:
        """Whether the trace is wanted at all."""
        return self.weight > 0 or bool(self.look)


class Strength:
    """The weight of every step of a training."""

    def __init__(
        self,
        weight: Weight,
        schedule: Schedule,
        *,
        held_out: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        accumulate: int = 1,
    ) -> None:
        self.schedule, self.weight, self._calls = schedule, weight, accumulate
        self._optimizer: torch.optim.Optimizer | None = None
        self._foreign = False
        """Whether the optimiser was found to be another model's."""
        self._place: int | None = None
        """For a sharded model: the rank whose parts of the averaged gradients are kept here."""
        self._held_out: Closure | held.HeldOutBatches | None = None
        self._asked = False
        """Whether some call has brought held-out data of its own."""
        self._read = 0
        """Held-out batches that a state speaks of, for those that a framework brings later."""
        self.equip(held_out, optimizer)

    def equip(self, held_out: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """Add held-out data and the optimiser, unless there are some already."""
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer must be the training's optimiser, as in optimizer=optimizer, "
                f"not {optimizer!r}"
            )
        if held_out is not None:
            source = held.source(held_out)
            self.weight = self.weight.with_held_out()
            if self._held_out is None:
                self._held_out = source
                self._go_on_reading()
        self._optimizer = self._optimizer or optimizer

    def dose(
        self, model: nn.Module, step: int, closure: Closure, given: Any = None, *, last: bool
    ) -> Dose:
        """What to do in the next call; ``last`` if it is the last of an accumulated step."""
        if given is not None:
            if isinstance(given, tuple):
                raise TypeError(
                    "a call reads no held-out batches, it would read the first again and again; "
                    "give the pair (batches, loss_fn) when the penalty is made, or "
                    "penalty.equip(held_out=...)"
                )
            self.weight = self.weight.with_held_out()
            self._asked = True
        elif last and not self._asked and self._held_out is None and self.weight.kind == "tuned":
            raise ValueError(_MISSING)  # now, and not at the first look, hours later
        if closure == (self._held_out if given is None else given):
            raise ValueError(
                "held_out is the training closure itself, which always favours a weight of 0; "
                "compute the loss on examples that are not trained on"
            )
        base = self.weight.at(step, self.schedule)
        due = self.schedule.due(step)
        if due:
            self.weight.overrun(step, self.schedule)
        look = self.weight.looks(step, self.schedule) if due and last else frozenset()
        chosen = None
        if HELD_OUT in look:
            source = self._held_out if given is None else held.source(given)
            if source is None:
                raise ValueError(_MISSING)
            chosen = source.closure(model) if isinstance(source, held.HeldOutBatches) else source
        calm = self.weight.calm
        most = None if calm is None else calm.most
        steady = self.weight.steady and self.schedule.grown(step)
        fixed = self.weight.kind == "given"
        return Dose(self.schedule.weight(base, step), base, most, look, steady, fixed, chosen)

    def _go_on_reading(self) -> None:
        if isinstance(self._held_out, held.HeldOutBatches):
            self._held_out.go_on(self._read)

    def look(
        self,
        dose: Dose,
        step: int,
        task: Task,
        estimate: Estimate,
        precision: str,
        ranks: Ranks,
        error: float | None,
    ) -> None:
        """Look at the gradients of one step, and move the weight of the next; ``error`` is the
        relative one of the trace's, where it is known.
        """
        if not dose.look:
            return
        weights = trainable(task.model)
        trace = gradient(estimate.trace, weights) if TRACE in dose.look else {}
        loss = gradient(estimate.loss, weights) if LOSS in dose.look else {}
        others: Vector = {}
        losses: tuple[torch.Tensor, ...] = ()
        if dose.held_out is not None:
            away = replace(task, closure=dose.held_out)
            value, others = held.gradient(away, precision, ranks)
            losses = (estimate.loss, value)
        metric = Preconditioner(self._optimizer)
        if self._optimizer is not None and not self._foreign and not metric.holds(weights):
            self._foreign = True
            warn(
                "seht: the optimizer= of the penalty holds none of the model's parameters, so that "
                "gradients are compared as they are; give the optimiser that trains this model, "
                "made after the model was copied or wrapped"
            )
        hidden = error == math.inf
        seen = Seen(weights, loss, trace, others, metric, ranks, losses, self._calls, hidden)
        self.weight.learn(step, self.schedule, seen)
        self._place = ranks.place()

    def lasts(self, total_steps: int) -> None:
        """The training has so many steps."""
        self.schedule = replace(self.schedule, total_steps=total_steps)

    def back(self) -> Callable[[], None]:
        """The way back to what is known now."""
        weight, inside, batches = self.weight, self.weight.back(), self._held_out
        read = batches.back() if isinstance(batches, held.HeldOutBatches) else None

        def back() -> None:
            inside()
            self.weight = weight
            if read is not None:
                read()

        return back

    def close(self, step: int) -> None:
        """The training is over: say so if nothing of it was penalised."""
        self.schedule.warn_if_unused(step)
        if step > 0 and step > self.schedule.plain_steps:
            self.weight.warn_if_unfound()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        batches = self._held_out
        read = batches.read if isinstance(batches, held.HeldOutBatches) else self._read
        return {**self.weight.state(), "read": read, "place": self._place}

    def load_state(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Take over what :meth:`state` returned."""
        place = state.get("place")
        if place is not None and state.get("loss") and place != ranks.place():
            raise ValueError(
                f"this state was saved by rank {place} while the share was measured on its shards; "
                "save and load the penalty's state on every rank until penalty.last.weight is known"
            )
        weight = self.weight
        if isinstance(weight, OpenWeight) and state.get("kind") == TunedWeight.kind:
            weight = TunedWeight(Tuning())  # the held-out data come later, as they did before
        try:
            weight.load_state(state)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"this state of a {weight.kind} weight is not complete ({error}): another version "
                "of seht wrote it; continue with that one, or without load_state_dict"
            ) from error
        self.weight, self._place, self._read = weight, place, int(state["read"])
        self._go_on_reading()
