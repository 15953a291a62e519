"""Every rule of the table of kinks: the two engines agree in float64, in value and gradient.

At the engine's own step hardly any kink is crossed; at a coarse one many are, and without its rule
a case goes wrong there. So the coarse step shows that decisions are frozen, the fine one that they
are frozen in the right place.
"""

from functools import cache

import kinks_constants  # noqa: F401  (the modules add their cases)
import kinks_elementwise  # noqa: F401
import kinks_foreach  # noqa: F401
import kinks_losses  # noqa: F401
import kinks_places  # noqa: F401
import pytest
import torch
from kinked import CASES, Kink, problem
from reference import gradient, relative

import seht
from seht import probes
from seht.operators.table import KINKS
from seht.replay import mode

COARSE = 0.1
CROSSING = [case for case in CASES if case.crosses]
SEED, WEIGHT = 4, 10.0


def seeded(function, shape):
    model, closure, leaves = problem(function, shape)
    torch.manual_seed(1)  # random functions draw the same numbers in both engines
    return model, closure, leaves


def estimate(function, shape, **options):
    """The trace, and its gradient in every parameter and input."""
    model, closure, leaves = seeded(function, shape)
    seed = probes.call_seed(SEED, 0, 0)  # what a penalty of that seed draws in its first step
    trace = seht.hessian_trace(model, closure, seed=seed, **options)
    return trace.item(), gradient(trace, leaves)


@cache
def truth(case: Kink):
    return estimate(case.truth or case.function, case.shape, engine="autograd")


def error(case: Kink, **options) -> float:
    _, ours = estimate(case.function, case.shape, engine="difference", **options)
    return relative(ours, truth(case)[1])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.supports("{case.operator}", section="decisions", engine="difference")
@pytest.mark.supports("{case.own_truth}", section="decisions", engine="autograd")
def test_agrees(case):
    value, g = truth(case)
    ours, our_g = estimate(case.function, case.shape, engine="difference")
    assert abs(ours / value - 1) < 1e-5
    assert relative(our_g, g) < 5e-6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_in_the_lean_form(case):
    """Its recorder keeps less: masks instead of outputs."""
    _, closure, leaves = seeded(case.function, case.shape)
    plain = gradient(closure(), leaves)
    model, closure, leaves = seeded(case.function, case.shape)
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine="difference", seed=SEED)
    penalty.backward(closure)
    total = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
    ours = [(a - b) / WEIGHT for a, b in zip(total, plain, strict=True)]
    assert relative(ours, truth(case)[1]) < 5e-6


@pytest.mark.parametrize("case", CROSSING, ids=str)
def test_agrees_across_kinks(case):
    assert error(case, kappa=COARSE) < 0.1


class Table(dict):
    """The table, which remembers what was looked up and found."""

    def __init__(self, *items):
        super().__init__(*items)
        self.found = []

    def get(self, function, default=None):
        rule = super().get(function, default)
        if rule is not None and function not in self.found:
            self.found.append(function)
        return rule


@pytest.mark.parametrize("case", CROSSING, ids=str)
def test_goes_wrong_without_its_rule(monkeypatch, case):
    table = Table(KINKS)
    monkeypatch.setattr(mode, "KINKS", table)
    frozen = error(case, kappa=COARSE)

    def wrong(function) -> bool:
        monkeypatch.setattr(mode, "KINKS", {f: r for f, r in KINKS.items() if f != function})
        try:
            return not error(case, kappa=COARSE) < 4 * frozen
        except seht.UnrepeatableError:
            return True  # a decision that is free may also show in what comes after it

    assert any(wrong(function) for function in table.found)
