"""The methods made of :class:`seht.HessianTrace`: one for each estimator, and what they share."""

from __future__ import annotations

import dataclasses
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from seht import HessianTrace
from seht.errors import PenaltyWarning, warn
from seht.estimators import ESTIMATORS, SehtH, SehtS
from seht.lab.methods.base import Closure, Method, Run, at_least, keyword_types, positive, share
from seht.lab.methods.loss import StepClosure


@dataclass(frozen=True)
class PenalisedLoss:
    """A penalised closure that remembers the one without penalties."""

    run: Closure
    plain: Closure

    def __call__(self) -> Any:
        return self.run()


class TracePenalty(Method):
    """Adds ``weight * trace`` to the objective; ``options`` are those of ``HessianTrace``.

    With ``part`` below 1 the trace is that of the loss on this part of each batch, which is cheaper
    and varies more.
    """

    penalty: HessianTrace

    def __init__(self, *, part: float = 1.0, **options: Any) -> None:
        self.part = share("part", positive("part", part), one=True)
        self.penalty_options = options
        # A wrong option should fail here, not when data and model have been built.
        self.make(nn.ParameterList([torch.zeros(1, 1)]), params=None, total_steps=1)

    def make(self, model: nn.Module, **changes: Any) -> HessianTrace:
        """The penalty of a model; ``total_steps`` is the length of the training."""
        return HessianTrace(model, **{**self.penalty_options, **changes})

    def params(self, model: nn.Module) -> str | Sequence[str] | None:
        """Which tensors are probed."""
        return self.penalty_options.get("params")

    def setup(self, run: Run) -> None:
        """Make the penalty. With SAM a step calls it twice, which counts as one of its steps."""
        changes: dict[str, Any] = {}
        if self.tuned:
            if run.held_out is None or not len(run.held_out[0]):
                raise ValueError(
                    f"{self.name}(weight=tuned) looks at validation examples, and there are none; "
                    "hold some out with --data.validation"
                )
            changes["held_out"] = run.held_out
        self.penalty = self.make(
            run.model,
            params=self.params(run.model),
            total_steps=run.steps,
            seed=run.seed,
            accumulate=run.passes,
            optimizer=run.optimizer,
            **changes,
        )
        plain = self.penalty.schedule.plain_steps
        if plain >= run.steps:
            warn(
                f"{self.name} penalises nothing here: its warm-up of {plain} steps outlasts the "
                f"training of {run.steps}; give it as a fraction, {self.name}(warmup=0.1)"
            )
        estimator = self.penalty.estimator
        modules = run.model.modules()
        coupled = any(isinstance(module, _BatchNorm) and module.training for module in modules)
        if coupled and isinstance(estimator, SehtS) and estimator.coupling == "refuse":
            # An error now is better than one at the first penalised step.
            raise ValueError(
                f"{self.name}: the examples of a batch meet in BatchNorm; use --model.norm group, "
                f"or {self.name}(coupling=frozen)"
            )

    def objective(self, closure: Closure) -> Closure:
        """Add the penalty; its trace is that of the loss without other Hessian penalties."""
        plain = closure.plain if isinstance(closure, PenalisedLoss) else closure
        on = plain if self.part == 1 else self._part_of(plain)
        if on is closure:
            return PenalisedLoss(lambda: self.penalty(closure), plain)
        return PenalisedLoss(lambda: self.penalty(closure, on=on), plain)

    def _part_of(self, plain: Closure) -> Closure:
        if not isinstance(plain, StepClosure):
            raise ValueError(
                f"{self.name}(part={self.part:g}) needs the loss of a part of the batch, and "
                "another method has wrapped the loss; leave out part= or that method"
            )
        return plain.of(self.part)

    def log(self) -> dict[str, float]:
        last = self.penalty.last
        if last is None or last.trace is None:
            return {"penalty": 0.0}
        return {"trace": last.trace, "penalty": last.penalty}

    @property
    def tuned(self) -> bool:  # type: ignore[override]
        """Whether held-out data find the weight."""
        return bool(self.penalty_options.get("weight") == "tuned")

    def paths(self) -> dict[str, Any]:
        if not self.tuned:
            return {}
        with warnings.catch_warnings():  # where there is none yet, --refit says so
            warnings.simplefilter("ignore", PenaltyWarning)
            path = self.penalty.path
        return {} if path is None else {self.name: path.state()}

    def seek(self, step: int) -> None:
        """The penalty counts its calls."""
        state = self.penalty.state_dict()
        self.penalty.load_state_dict({**state, "calls": step * self.penalty.accumulate})

    def state_dict(self) -> dict[str, Any]:
        return self.penalty.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.penalty.load_state_dict(state)


class EstimatorPenalty(TracePenalty):
    r"""The loss plus :math:`\lambda` times the trace that an estimator of the library estimates.

    Liu, Yu and Lin, arXiv 2208.05924. Its options are the estimator's, those of
    :class:`seht.HessianTrace`, two of the difference engine, and ``part``, the part of each batch
    whose trace is taken; ``weight`` 1e-3 is the paper's for CIFAR-10, there with 5 probes.
    """

    estimator: ClassVar[type[Any]]

    def __init__(self, *, weight: float | str | None = None, **options: Any) -> None:
        if weight is None and options.get("share") is None:
            weight = _WEIGHT
        # The difference engine's own go along only where they were set: autograd refuses them.
        engine = {name: options.pop(name) for name in _ENGINE if name in options}
        options |= {name: value for name, value in engine.items() if value}
        super().__init__(weight=weight, estimator=self.name, **options)

    @classmethod
    def settled(cls, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The user's share replaces the recipe's weight, and the user's weight its share."""
        for one, other in (("share", "weight"), ("weight", "share")):
            if one in given:
                settings = {name: value for name, value in settings.items() if name != other}
        return {**settings, **given}

    @classmethod
    def options(cls) -> dict[str, Any]:
        """In this order: the weight, the estimator's, the penalty's, the engine's."""
        own, hints = typing.get_type_hints(cls.estimator), keyword_types(HessianTrace.__init__)
        found = {"weight": float | str | None}
        found |= {f.name: own[f.name] for f in dataclasses.fields(cls.estimator)}
        shared = {name: hint for name, hint in hints.items() if name not in (*_LABS, *found)}
        return found | shared | _ENGINE | {"part": float}


_WEIGHT = 1e-3
_LABS = ("estimator", "boundary", "total_steps", "accumulate", "seed", "held_out", "optimizer")
"""Arguments of the penalty that the lab fills in."""
_ENGINE = {"kappa": float | None, "two_sided": bool}

_PART = """    In the lab ``part`` below 1 takes the trace of the loss on this part of each batch.
    """

PENALTIES: list[type[Method]] = [
    type(
        estimator.__name__,
        (EstimatorPenalty,),
        {"name": name, "estimator": estimator, "__doc__": f"{estimator.__doc__}\n{_PART}"},
    )
    for name, estimator in ESTIMATORS.items()
]
"""A method of the same name for every estimator: a new one needs nothing here."""


class HtrMiddle(TracePenalty):
    r"""The trace of the middle half of the parameter tensors, every 50th step.

    Tensors n // 4 to 3 n // 4 of ``named_parameters()``, norm scales and biases included; Gaussian
    probes; every 50th step of the last three quarters of training. arXiv 2012.03801, and "Middle
    Network Method" in the paper.

    Args:
        weight: gamma, on the steps that are penalised.
        probes: on such a step.
        every: how many steps lie between.
        start: the share of training that comes before.
    """

    name = "htr-middle"
    excludes = frozenset({"htr-full"})

    def __init__(
        self, *, weight: float = 1e-5, probes: int = 3, every: int = 50, start: float = 0.25
    ) -> None:
        super().__init__(
            # HessianTrace makes up for skipped steps with the weight, this method does not.
            weight=weight / at_least("every", every, 1),
            estimator=SehtH(probes=probes, distribution="gaussian"),
            every=every,
            warmup=share("start", start, one=False) or 0,
        )

    def make(self, model: nn.Module, **changes: Any) -> HessianTrace:
        """Without warnings: rare steps and their weight are part of the method."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenaltyWarning)
            return super().make(model, **changes)

    def params(self, model: nn.Module) -> list[str]:
        names = tensors(model)
        return names[len(names) // 4 : 3 * len(names) // 4]


class HtrFull(HtrMiddle):
    r"""The trace of all parameter tensors, every 50th step: arXiv 2012.03801, "full network".

    Args:
        weight: gamma, on the steps that are penalised.
        probes: on such a step.
        every: how many steps lie between.
        start: the share of training that comes before.
    """

    name = "htr-full"
    excludes = frozenset({"htr-middle"})

    def __init__(
        self, *, weight: float = 1e-6, probes: int = 3, every: int = 50, start: float = 0.25
    ) -> None:
        super().__init__(weight=weight, probes=probes, every=every, start=start)

    def params(self, model: nn.Module) -> list[str]:
        return tensors(model)


def tensors(model: nn.Module) -> list[str]:
    """The names of what is trained, in the model's order."""
    return [name for name, p in model.named_parameters() if p.requires_grad]
