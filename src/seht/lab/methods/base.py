"""The interface between a method (a regulariser) and the training loop.

A method changes the recipe, the batch, the model, the objective or the optimiser, by overriding the
functions of :class:`Method`. A combination calls those of each method in turn.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from seht.lab.config import KINDS, Recipe


@dataclass(frozen=True)
class Batch:
    """One step's examples."""

    x: Tensor
    """Examples ``(batch, ...)``, such as images ``(batch, channels, height, width)``, normalised;
    or tokens ``(time, batch)``."""
    y: Tensor
    """Classes ``(batch,)``; or the next tokens ``(time, batch)``."""
    other: Tensor | None = None
    """Second labels (mixup)."""
    share: float = 1.0
    """Weight of ``y``; ``other`` has the rest."""
    hidden: Any = None
    """Text: the hidden state that the batch before ended with, detached."""


@dataclass(frozen=True)
class Forward:
    """The results of the forward pass, for terms of the loss."""

    model: nn.Module
    batch: Batch
    logits: Tensor
    """``(examples, classes)``; text: one row per token."""
    loss: Tensor
    """The (smoothed, mixed) cross-entropy."""


@dataclass(frozen=True)
class Run:
    """The run that a method is set up for."""

    recipe: Recipe
    model: nn.Module
    classes: int
    steps_per_epoch: int
    seed: int
    passes: int = 1
    """How often a step computes the objective; :class:`Combined` fills it in."""
    optimizer: Optimizer | None = None
    """The recipe's own, before a method changes or wraps it."""
    held_out: Any = None
    """The validation split, ``(batches, loss_fn)``; there may be no batches in it."""

    @property
    def steps(self) -> int:
        """The number of steps of the whole training."""
        return self.steps_per_epoch * self.recipe.epochs


Closure = Callable[[], Any]
"""Returns ``(loss, aux)``: the loss of one forward pass, with every term of every method in it."""


class Method:
    """A way to train; every function below does nothing unless it is overridden.

    The options of a method are the keyword arguments of its ``__init__``, and its docstring is its
    card: formula, source, default settings.
    """

    name: ClassVar[str]
    tasks: ClassVar[frozenset[str]] = frozenset(KINDS)
    """The tasks that it can be used for."""
    excludes: ClassVar[frozenset[str]] = frozenset()
    """Names of methods that contradict this one."""

    smoothing: float = 0.0
    """Label smoothing's epsilon in the cross-entropy."""
    passes: int = 1
    """How often a step computes the objective. With 1 the loop calls ``optimizer.step()``, as plain
    optimisers would run a closure in vain; with 2 (SAM) it calls ``optimizer.step(closure)``."""
    chooses: bool = False
    """Whether a run ends with the weights of the epoch that was best on the validation data."""
    tuned: bool = False
    """Whether it finds its weight on the validation data."""
    input_gradient: bool = False
    """Whether a term needs the gradient in ``forward.batch.x``."""

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The type of every option, in the order of the method's text."""
        return keyword_types(cls.__init__)

    @classmethod
    def settled(cls, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that apply: the recipe's settings, overridden by the user's."""
        return {**settings, **given}

    def configure(self, recipe: Recipe) -> Recipe:
        """Change the recipe, before anything is built from it."""
        return recipe

    def setup(self, run: Run) -> None:
        """Called once, when the model is on its device: add hooks, penalties, counters."""

    def batch(self, batch: Batch, step: int) -> Batch:
        """Change the examples of a step; draws from torch's global random state."""
        return batch

    def term(self, forward: Forward) -> Tensor | None:
        """A term to add to the loss, computed inside the closure."""
        return None

    def objective(self, closure: Closure) -> Closure:
        """Wrap the closure; the result is called once per step and differentiated."""
        return closure

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Change or wrap the optimiser. If :attr:`passes` is 2, its ``step`` gets a closure that
        computes loss and gradient again: the objective, ``backward``, clipping.
        """
        return optimizer

    def after_step(self) -> None:
        """Called after every step of the optimiser."""

    def judged(self) -> AbstractContextManager[None]:
        """A context in which the model has the weights to validate, test and keep."""
        return nullcontext()

    def stop(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether to end the training now; ``rows`` are those of ``metrics.csv``."""
        return False

    def log(self) -> dict[str, float]:
        """Figures of the last step for ``metrics.csv`` (trace, penalty)."""
        return {}

    def paths(self) -> dict[str, Any]:
        """The path of a tuned weight, as plain values, by the method's name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""

    def seek(self, step: int) -> None:
        """Jump to that step of the schedule (warm-up, ``every``), for timing."""


def keyword_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of every argument that is given by its name."""
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    return {name: hints[name] for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


# --- the ranges of options, checked where a method is made ------------------------------------


def not_negative(name: str, value: float) -> float:
    """A finite number, 0 or more."""
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number, 0 or more, not {value!r}")
    return value


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
    return value


def share(name: str, value: float, *, one: bool) -> float:
    """A number from 0 up to 1, with or without 1 itself."""
    if not 0 <= value <= 1 or (value == 1 and not one):
        raise ValueError(f"{name} must be in [0, 1{']' if one else ')'}, not {value!r}")
    return value


def at_least(name: str, value: int, least: int) -> int:
    """A whole number, ``least`` or more."""
    if value < least:
        raise ValueError(f"{name} must be {least} or more, not {value}")
    return value
