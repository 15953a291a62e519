"""Several methods as one: each is asked in turn, in the order of the registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from seht.lab.config import Recipe
from seht.lab.methods.base import Batch, Closure, Forward, Method, Run


class Combined(Method):
    """A combination of methods; the loop uses one even for a single method."""

    name = "combined"

    def __init__(self, methods: Sequence[Method]) -> None:
        for a, b in combinations(methods, 2):
            if a.name == b.name:
                raise ValueError(f"{a.name} is given twice in one combination; leave one out")
            if b.name in a.excludes or a.name in b.excludes:
                raise ValueError(f"{a.name} and {b.name} contradict each other; leave one out")
        self.methods = tuple(methods)
        self.tasks = frozenset.intersection(*(m.tasks for m in methods))  # type: ignore[misc]
        self.passes = max(m.passes for m in methods)
        self.chooses = any(m.chooses for m in methods)
        self.input_gradient = any(m.input_gradient for m in methods)
        kept = 1.0
        for method in methods:  # smoothing twice keeps (1 - a) (1 - b) of the label
            kept *= 1 - method.smoothing
        self.smoothing = 1 - kept if kept < 1 else 0.0

    def configure(self, recipe: Recipe) -> Recipe:
        for method in self.methods:
            recipe = method.configure(recipe)
        return recipe

    def setup(self, run: Run) -> None:
        """Each learns how often a step computes the objective."""
        for method in self.methods:
            method.setup(replace(run, passes=self.passes))

    def batch(self, batch: Batch, step: int) -> Batch:
        for method in self.methods:
            batch = method.batch(batch, step)
        return batch

    def term(self, forward: Forward) -> Tensor | None:
        terms = [t for t in (m.term(forward) for m in self.methods) if t is not None]
        return sum(terms[1:], terms[0]) if terms else None

    def objective(self, closure: Closure) -> Closure:
        """One around the other; trace penalties add up (``trace.py``)."""
        for method in self.methods:
            closure = method.objective(closure)
        return closure

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        for method in self.methods:
            optimizer = method.optimizer(optimizer)
        return optimizer

    def after_step(self) -> None:
        for method in self.methods:
            method.after_step()

    @contextmanager
    def judged(self) -> Iterator[None]:
        with ExitStack() as held:
            for method in self.methods:
                held.enter_context(method.judged())
            yield

    def stop(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        return any(method.stop(rows) for method in self.methods)

    def log(self) -> dict[str, float]:
        """Penalties are added up; of other figures the last method's is kept."""
        found: dict[str, float] = {}
        for method in self.methods:
            figures = method.log()
            if "penalty" in figures:
                figures["penalty"] += found.get("penalty", 0.0)
            found.update(figures)
        return found

    def paths(self) -> dict[str, Any]:
        return {name: path for m in self.methods for name, path in m.paths().items()}

    def seek(self, step: int) -> None:
        for method in self.methods:
            method.seek(step)

    def state_dict(self) -> dict[str, Any]:
        return {m.name: m.state_dict() for m in self.methods}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuses the state of another combination."""
        names = {m.name for m in self.methods}
        if names != state.keys():
            raise ValueError(
                f"this state belongs to {'+'.join(state) or 'nothing'}, not to "
                f"{'+'.join(m.name for m in self.methods)}; resume with the same method"
            )
        for method in self.methods:
            method.load_state_dict(state[method.name])
