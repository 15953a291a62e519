"""What one call of the penalty does, plain or penalised, from the first step to the last.

`HessianTrace` has the two forms of a call. What they have in common is here: ask for the weight
(``strength/``), describe the estimate (a task), compute it (an engine), record it (an account).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seht import probes
from seht.account import Account
from seht.distributed import Ranks, ranks_of, unwrapped
from seht.engines import Engine
from seht.estimators import Estimator
from seht.replay.closures import Guarded, alone, check_arguments
from seht.replay.state import BorrowedBuffers
from seht.strength.strength import Dose, Strength
from seht.task import Closure, Estimate, Task, check_loss, parameters_of, split
from seht.tensors.random_state import RandomState
from seht.tensors.undo import Undo, differentiated, interruptible, uninterrupted


@dataclass(frozen=True)
class PenaltySettings:
    """The settings of a penalty, which are the same in all calls."""

    model: nn.Module
    estimator: Estimator
    curvature: str
    params: probes.ParamSpec
    boundary: str | None
    accumulate: int
    """How many calls make up one optimiser step."""
    limit: float | None
    on_nonfinite: str


@dataclass(frozen=True)
class Step:
    """The result of one call."""

    output: Any
    """What it returns: the penalised loss, and aux if the closure returns one."""
    commit: Callable[[], None] | None = None
    """After a penalised step: updates the buffers."""
    loss: Tensor | None = None
    """After a penalised step: this rank's loss without the penalty."""


class Course:
    """The calls of one penalty, one after the other."""

    def __init__(
        self, settings: PenaltySettings, engine: Engine, strength: Strength, seed: int
    ) -> None:
        self.settings, self.engine, self.strength = settings, engine, strength
        self.account = Account(settings.on_nonfinite)
        self.ranks: Ranks = ranks_of(settings.model)
        self.seed = seed

    @property
    def number(self) -> int:
        """The number of the step that the next call belongs to."""
        return self.account.calls // self.settings.accumulate

    @contextmanager
    def whole(self) -> Iterator[Undo]:
        """Around a call: if it fails or is interrupted, nothing of it is left."""
        with uninterrupted(), Undo() as undo:
            undo.add(self.account.back())
            undo.add(self.engine.back())
            undo.add(self.strength.back())
            yield undo

    def step(
        self,
        closure: Closure,
        on: Closure | None,
        undo: Undo,
        *,
        lean: bool,
        scaler: Any = None,
        held_out: Any = None,
    ) -> Step:
        """One call, inside :meth:`whole`."""
        model = self.settings.model
        check_arguments(model, closure)
        if on is not None:
            check_arguments(model, on)
        if not torch.is_grad_enabled():
            with interruptible():
                return Step(closure())
        ranks = self.ranks = ranks_of(model, self.ranks)
        estimator, elsewhere = self.settings.estimator, on is not None
        ranks.settle(self.engine.name, estimator, lean=lean, elsewhere=elsewhere)
        step, call = divmod(self.account.calls, self.settings.accumulate)
        last = call == self.settings.accumulate - 1  # one weight for all calls of a step
        dose = self.strength.dose(model, step, closure, held_out, last=last)
        among = ranks.call(lean=lean)
        task = None
        if dose.penalised:
            task = self._task(among.checked(closure if on is None else on), step, call, dose)
        with among:
            if task is None:
                # Beside on= the closure never repeats, and may hold another penalty.
                around = alone() if on is None else nullcontext()
                output = self._plain(closure, step, around, look=dose.base > 0)
                done = Step(among.finish(output))
            else:
                undo.add(task.random.back())
                among.penalise()
                if on is None:
                    estimate = self.engine.estimate(task, ranks, lean=lean, watch=True)
                else:
                    estimate = self._elsewhere(task, closure)
                total = self._penalise(task, estimate, step, dose)
                if lean and estimate.total is None:
                    total = differentiated(total, scaler)
                _, aux, has_aux = split(estimate.output)
                own = estimate.loss.detach() if estimate.own is None else estimate.own
                output = among.finish((total, aux) if has_aux else total)
                done = Step(output, estimate.commit, own)
        self.account.count()
        return done

    def _task(self, closure: Closure, step: int, call: int, dose: Dose) -> Task | None:
        """The task of this call; ``None`` if no layer is drawn."""
        settings = self.settings
        self.seed = self.ranks.seed(self.seed, self.account.calls)
        return make_task(
            settings.model,
            closure,
            probes.choose(settings.model, settings.params),
            settings.estimator,
            probes.call_seed(self.seed, step, self.ranks.number(call)),
            curvature=settings.curvature,
            boundary=settings.boundary,
            weight=dose.weight,
            limit=settings.limit,
            most=dose.most,
            skip=settings.on_nonfinite == "skip",
            apart=bool(dose.look),
        )

    def _elsewhere(self, task: Task, closure: Closure) -> Estimate:
        """The loss of the main closure with the trace of another."""
        with BorrowedBuffers(task.model) as buffers:
            output = closure()
        loss = check_loss(split(output)[0])
        after = RandomState(task.parameters, task.random)
        with after.all_kept():
            trace = replace(task, limit=None, random=after)
            estimate = self.engine.estimate(trace, self.ranks, watch=True)
        return replace(estimate, loss=loss, output=output, commit=buffers.commit)

    def _plain(
        self, closure: Closure, step: int, around: AbstractContextManager[None], *, look: bool
    ) -> Any:
        with interruptible():
            if look:
                with around:
                    output = Guarded(tuple(self.settings.model.modules()), closure)()
            else:
                output = closure()
        loss = split(output)[0]
        if look:
            self.account.plain(step, self.ranks.noted(check_loss(loss)).item())
        else:
            self.account.unseen(step, loss)
        return output

    def _penalise(self, task: Task, estimate: Estimate, step: int, dose: Dose) -> Tensor:
        """Look at the estimate, note it, and return the penalised loss."""
        total, record, everywhere = self.account.charge(
            task, estimate, step, self.ranks, steady=dose.steady, given=dose.given
        )
        error = self.account.note(record, task, estimate, self.engine.name)
        if everywhere:  # all ranks take part in a look, or none
            precision = self.engine.precision
            self.strength.look(dose, step, task, estimate, precision, self.ranks, error)
        if record.trace is not None and math.isfinite(record.trace):
            self.strength.weight.charged(record.trace)
        return total

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: calls, seed, weight, the engine's step size, running means."""
        return {
            **self.account.state(),
            "seed": self.seed,
            "curvature": self.settings.curvature,
            "engine": self.engine.state(),
            "strength": self.strength.state(),
            "ranks": self.ranks.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        missing = {"calls", "seed", "guard"} - (state.keys() if isinstance(state, dict) else set())
        if missing:
            raise ValueError(
                f"this is no state of a HessianTrace: {', '.join(sorted(missing))} missing"
            )
        seed = probes.check_seed(state["seed"])
        account = Account(self.settings.on_nonfinite)
        account.load_state(state)
        # A weight that is given has nothing to remember.
        strength = state.get("strength", {"kind": "given", "read": 0})
        kinds, mine = {self.strength.weight.kind, strength.get("kind")}, self.settings.curvature
        found = state.get("curvature", mine)
        if kinds <= {"share", "tuned"} and found != mine:
            raise ValueError(
                f"this state has a weight that was found for curvature={found!r}, and this penalty "
                f"has {mine!r}; make it with the curvature= of the run that was saved"
            )
        with Undo() as undo:
            undo.add(self.engine.back())
            undo.add(self.strength.back())
            if state.get("engine"):
                self.engine.load_state(state["engine"])
            self.strength.load_state(strength, ranks_of(self.settings.model, self.ranks))
        self.seed, self.account = seed, account
        self.ranks.reset(state.get("ranks"))


def make_task(
    model: nn.Module,
    closure: Closure,
    chosen: probes.Chosen,
    estimator: Estimator,
    seed: int,
    **options: Any,
) -> Task | None:
    """Draw the layers; ``None`` if none is drawn."""
    indices = estimator.layers(len(chosen.tensors), probes.layer_seed(seed))
    if not indices:
        return None
    items = list(chosen.tensors.items())
    weights = dict(items[i] for i in indices)
    model = unwrapped(model)
    modules = tuple(model.modules())
    return Task(
        model,
        modules,
        Guarded(modules, closure),
        weights,
        tuple(indices),
        chosen.named,
        len(items),
        estimator,
        seed,
        random=RandomState(parameters_of(modules)),
        **options,
    )
