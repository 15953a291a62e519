"""Networks in single precision, at initialisation and trained, with a copy in double beside them.

What the float32 tests of the difference engine share. The data can be learnt: curvature wants
examples that have something in common.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reference import gradient, relative
from torch import Tensor, nn

import seht
from seht.lab import models
from seht.lab.bench.cases import images, text

WORDS = 20


@dataclass
class Problem:
    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], Tensor]

    def closure(self) -> Tensor:
        return self.loss_fn(self.model, self.batch)

    def double(self) -> "Problem":
        batch = tuple(x.double() if x.is_floating_point() else x for x in self.batch)
        return Problem(copy.deepcopy(self.model).double(), batch, self.loss_fn)

    def parameters(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    z = model(batch[0])
    z = z[0] if isinstance(z, tuple) else z
    return F.cross_entropy(z.flatten(0, -2), batch[1].flatten())


def pictures(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return images(16, draw, channels=3, size=12)


def sentences(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return text(8, draw, vocabulary=WORDS, length=8)


def recurrent(cell: str) -> Callable[[], nn.Module]:
    sizes = {"vocabulary": WORDS, "embedding": 12, "hidden": 12, "dropout": 0.0}
    return lambda: models.RecurrentLM(cell, **sizes)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "resnet18": (lambda: models.resnet18(width=4), pictures),
    "wrn": (lambda: models.WideResNet(10, 1, width=8, classes=10), pictures),
    "lstm": (recurrent("lstm"), sentences),
    "gru": (recurrent("gru"), sentences),
    "gpt": (lambda: models.GPT(vocabulary=WORDS, context=8, width=16, layers=2), sentences),
    "mlp": (lambda: models.MLP(3 * 12 * 12, 24, 24, 10), pictures),
}


def problem(name: str, steps: int = 0) -> Problem:
    """The network after some steps of Adam, each on another batch."""
    build, data = NETWORKS[name]
    torch.manual_seed(0)
    return trained(build(), data, cross_entropy, steps)


def trained(
    model: nn.Module, data: Callable[[torch.Generator], Any], loss_fn: Callable, steps: int
) -> Problem:
    draw = torch.Generator().manual_seed(1)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        adam.zero_grad()
        loss_fn(model, data(draw)).backward()
        adam.step()
    model.zero_grad()
    return Problem(model, data(draw), loss_fn)


@dataclass(frozen=True)
class Call:
    """A penalised step: the error that it states, and the true one of the gradient it gave."""

    stated: float | None
    error: float
    warned: bool
    """Whether the user had heard of a bad step by then."""

    @property
    def honest(self) -> bool:
        """Within a factor of 3, or none stated, or a warning.

        Below a percent it is of no consequence; an answer that is mostly noise is called noise,
        however much of it there is.
        """
        if self.stated is None or self.warned or max(self.stated, self.error) < 0.01:
            return True
        return self.error / 3 < self.stated < 3 * self.error or min(self.stated, self.error) > 0.5


def calls(single: Problem, count: int, *, weight: float = 1e-3, **options: Any) -> Iterator[Call]:
    """Penalised steps at the same weights, each with another probe."""
    exact = single.double()
    penalty = seht.HessianTrace(single.model, weight=weight, engine="difference", seed=3, **options)
    truth = {k: v for k, v in options.items() if k not in ("two_sided", "kappa")}
    estimate, made = penalty._course.engine.estimate, []

    def noted(*args: Any, **named: Any) -> Any:
        made.append(estimate(*args, **named))
        return made[-1]

    penalty._course.engine.estimate = noted
    warned = False
    while count:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            penalty(single.closure)
        warned |= any("the difference engine's gradient" in str(w.message) for w in caught)
        if penalty.last.trace is None:  # no layer drawn
            continue
        count -= 1
        found = [g.double() for g in gradient(made.pop().trace, single.parameters())]
        right = seht.hessian_trace(
            exact.model, exact.closure, engine="autograd", seed=penalty.last.seed, **truth
        )
        error = relative(found, gradient(right, exact.parameters()))
        yield Call(penalty.last.error, error, warned)


@dataclass
class Settled:
    """The engine after some calls at the same weights, when it has found its step."""

    problem: Problem
    options: dict[str, Any]
    calls: int = 6

    def __post_init__(self) -> None:
        self.penalty = seht.HessianTrace(
            self.problem.model, weight=1e-6, engine="difference", seed=3, **self.options
        )
        while self.calls or self.penalty.last.trace is None:
            self.penalty(self.problem.closure)
            self.calls = max(0, self.calls - 1)

    @property
    def kappa(self) -> float:
        return self.penalty.state_dict()["engine"]["kappa"]

    @property
    def stated(self) -> float:
        """The error that the engine states."""
        return self.penalty.last.error

    def errors(self, exact: Problem, seed: int, **truth: Any) -> tuple[float, float]:
        """Of value and gradient of one draw at the engine's step, against the double copy."""
        ours = self._estimate(self.problem, seed, engine="difference", kappa=self.kappa)
        options = {"engine": "autograd", **truth}
        right = self._estimate(exact, seed, **options)
        return abs(ours[0] / right[0] - 1), relative([g.double() for g in ours[1]], right[1])

    def _estimate(self, problem: Problem, seed: int, **options: Any) -> tuple[float, list[Tensor]]:
        own = dict(self.options)
        if options["engine"] == "autograd":
            own.pop("two_sided", None)
        trace = seht.hessian_trace(problem.model, problem.closure, seed=seed, **{**own, **options})
        return trace.item(), gradient(trace, problem.parameters())
