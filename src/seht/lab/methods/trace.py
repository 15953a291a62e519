"""What the methods made of :class:`seht.HessianTrace` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from seht import HessianTrace
from seht.guards import warn
from seht.lab.methods.base import Closure, Method, Run


@dataclass(frozen=True)
class Objective:
    """A penalised closure that remembers the one without penalties."""

    run: Closure
    plain: Closure

    def __call__(self) -> Any:
        """Loss with penalties, and aux."""
        return self.run()


class TracePenalty(Method):
    """Adds ``weight * trace`` to the objective; ``options`` are those of ``HessianTrace``."""

    penalty: HessianTrace

    def __init__(
        self, *, kappa: float | None = None, two_sided: bool = False, **options: Any
    ) -> None:
        # The difference engine's own go along only where they were set: autograd refuses them.
        engine = {"kappa": kappa, "two_sided": two_sided}
        self.options = {**options, **{name: value for name, value in engine.items() if value}}
        # A wrong option should fail here, not when data and model have been built.
        self.make(_Smallest(), params=None, total_steps=1)

    def make(self, model: nn.Module, **changes: Any) -> HessianTrace:
        """The penalty of a model; ``total_steps`` is the length of the training."""
        return HessianTrace(model, **{**self.options, **changes})

    def params(self, model: nn.Module) -> str | Sequence[str] | None:
        """Which tensors are probed."""
        return self.options.get("params")

    def setup(self, run: Run) -> None:
        """With SAM a step calls the penalty twice; both calls count as one step of its schedule."""
        self.penalty = self.make(
            run.model,
            params=self.params(run.model),
            total_steps=run.steps,
            seed=run.seed,
            accumulate=run.passes,
        )
        plain = self.penalty.schedule.plain_steps
        if plain >= run.steps:
            warn(
                f"{self.name} penalises nothing here: its warm-up of {plain} steps outlasts the "
                f"training of {run.steps}; give it as a fraction, {self.name}(warmup=0.1)"
            )

    def objective(self, closure: Closure) -> Closure:
        """Penalties add up: the trace is that of the loss without the other penalties."""
        if not isinstance(closure, Objective):
            return Objective(lambda: self.penalty(closure), closure)
        plain = closure.plain
        return Objective(lambda: self.penalty(closure, on=plain), plain)

    def log(self) -> dict[str, float]:
        """Nothing of the trace on a plain step."""
        last = self.penalty.last
        if last is None or last.trace is None:
            return {"penalty": 0.0}
        return {"trace": last.trace, "penalty": last.penalty}

    def seek(self, step: int) -> None:
        """The penalty counts its calls."""
        state = self.penalty.state_dict()
        self.penalty.load_state_dict({**state, "calls": step * self.penalty.accumulate})

    def state_dict(self) -> dict[str, Any]:
        """The penalty's own: probes, guard rails, the engine's step."""
        return self.penalty.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.penalty.load_state_dict(state)


class _Smallest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
