"""The step of the difference engine: what its checks learn, how it adapts, what it says."""

import copy
import dataclasses
import math
import warnings
from itertools import pairwise

import pytest
import torch
from helpers import batch, closure_of, network
from single import problem

import seht
from seht.engines.looks import Look, compared
from seht.engines.step_size import START, StepControl

ORDERS = {"hessian": (2, 2), "ggn": (1, 1), "ggn-two-sided": (2, 1)}
every_order = pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)


class Simulated:
    """A gradient of length 1 with a truncation T e^a and a rounding R / e^b, as vectors."""

    def __init__(self, truncation, rounding, orders, size=1.0):
        self.sizes, (self.a, self.b), self.size = (truncation, rounding), orders, size
        self.common = 2 / 3 if self.b == 2 else 0.0  # the centre's share, in squares
        self.generator = torch.Generator().manual_seed(0)
        self.exact, self.bend, self.centre = self.unit(), self.unit(), self.unit()

    def unit(self):
        v = torch.randn(4000, generator=self.generator, dtype=torch.float64)
        return v / v.norm()

    def gradient(self, e):
        t, r = self.sizes
        # Another one each time, as rounding is, but for the centre's.
        noise = (1 - self.common) ** 0.5 * self.unit() + self.common**0.5 * self.centre
        return self.size * (self.exact + t * e**self.a * self.bend + r / e**self.b * noise)

    def error(self, e):
        t, r = self.sizes
        return math.hypot(t * e**self.a, r / e**self.b)

    def look(self, e):
        """What the engine would find at a step."""
        vectors = compared([self.gradient(f * e) for f in (0.5, 1.0, 2.0)], self.a)
        lengths = [v.norm().item() for v in vectors]
        return Look(*lengths, share=math.inf, common=self.common)

    def check(self, steps):
        """What the engine learns there."""
        self.seen = []

        def look(kappa):
            self.seen.append(kappa)
            return self.look(kappa)

        steps.search(look, self.a, self.b)


@every_order
@pytest.mark.parametrize("e", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_a_check_finds_the_error(orders, e, size):
    """From truncation alone to rounding alone."""
    for truncation, rounding in ((0.05, 0.0), (0.04, 0.03), (0.01, 0.05), (0.0, 0.05)):
        a, b = orders
        simulated = Simulated(truncation / e**a, rounding * e**b, orders, size)
        steps = StepControl(kappa=e, fixed=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            simulated.check(steps)
        assert steps.error == pytest.approx(simulated.error(e), rel=0.1)
        assert steps.kappa == e


@every_order
@pytest.mark.parametrize("error", [0.3, 1.0, 3.0])
def test_noise_is_not_measured_by_itself(orders, error):
    """A gradient that drowns in rounding is as long as the rounding."""
    simulated = Simulated(0.0, error * 0.01 ** orders[1], orders)
    found = simulated.look(0.01).error(*orders)
    assert error / 2 < found < 2 * error


@every_order
def test_what_cannot_be_seen_has_no_error_in_numbers(orders):
    simulated = Simulated(0.0, 365 * 0.01 ** orders[1], orders)
    assert simulated.look(0.01).error(*orders) > 10
    nothing = Simulated(0.0, 1.0, orders)
    nothing.exact = torch.zeros_like(nothing.exact)
    assert nothing.look(0.01).error(*orders) > 10


def test_too_large_an_error_by_truncation():
    for error in (0.5, 2.0):
        found = Simulated(error / 0.01**2, 0.0, (2, 2)).look(0.01).error(2, 2)
        assert error / 1.5 < found < 1.5 * error


@every_order
@pytest.mark.parametrize("start", [1e-4, 1e-2, 0.3])
def test_the_step_goes_to_the_best_one(orders, start):
    simulated = Simulated(1.0, 1e-7, orders)
    best = min(simulated.error(10 ** (-k / 50)) for k in range(300))
    steps = StepControl(kappa=start)
    for _ in range(2):
        simulated.check(steps)
        assert all(0.24 < b / a < 4.1 for a, b in pairwise(simulated.seen))
    assert simulated.error(steps.kappa) < max(2e-3, 1.5 * best)
    assert steps.error == pytest.approx(simulated.error(steps.kappa), rel=0.2)


def test_a_good_step_is_left_alone():
    simulated = Simulated(10.0, 0.0, (2, 2))
    steps = StepControl(kappa=0.01)
    simulated.check(steps)
    assert steps.error == pytest.approx(1e-3, rel=0.1)
    assert steps.kappa == 0.01
    assert simulated.seen == [0.01]


def test_a_given_step_is_looked_at_and_left_alone():
    simulated = Simulated(1e4, 0.0, (2, 2))
    steps = StepControl(kappa=0.01, fixed=True)
    with pytest.warns(seht.PenaltyWarning, match="truncation"):
        simulated.check(steps)
    assert (steps.kappa, simulated.seen) == (0.01, [0.01])
    assert steps.error == pytest.approx(1, rel=0.1)


def test_the_step_never_becomes_huge():
    simulated = Simulated(0.0, 1.0, (2, 2))
    steps = StepControl(kappa=0.1)
    with pytest.warns(seht.PenaltyWarning, match="rounding"):
        simulated.check(steps)
    assert 0.2 < steps.kappa <= 0.3
    assert steps.error > 3


def test_far_more_than_rounding_is_none():
    """A loss that bends within the step: nothing in common looks like noise, and a larger step
    would be worse.
    """
    look = Simulated(0.0, 1.0, (2, 2)).look(0.1)
    assert look.rounded(2, 2)
    assert look.factor(2, 2) > 1
    fine = dataclasses.replace(look, grain=1e-3)  # measured: 100
    assert not fine.rounded(2, 2)
    assert fine.factor(2, 2) == 0.25


def test_what_is_no_gradient_teaches_nothing():
    steps = StepControl(kappa=0.01)
    for small, size in ((math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0)):
        steps.search(lambda _, a=small, b=size: Look(a, a, b, b, b, b, a, share=1.0), 2, 2)
    assert (steps.kappa, steps.error) == (0.01, None)
    assert steps.next_check > 0


def test_an_error_is_stated_where_probes_agree():
    """On steps without a check: what three probes had in common, or nothing."""
    for errors, stated in (((1e-3, 1.3e-3, 1e-3), 1.09e-3), ((1e-3, 1e-3, 8e-3), None)):
        steps = StepControl(kappa=0.01, fixed=True)
        for error in errors:
            steps.start("hessian", torch.float32)
            assert steps.due
            Simulated(error / 0.01**2, 0.0, (2, 2)).check(steps)
            assert steps.error == pytest.approx(error, rel=0.1)
            steps.uses += 1
        steps.start("hessian", torch.float32)
        assert not steps.due
        assert steps.error == (None if stated is None else pytest.approx(stated, rel=0.1))


def test_checks_become_rare():
    simulated = Simulated(1.0, 0.0, (2, 2))
    steps = StepControl(kappa=0.01)
    checks = []
    for _ in range(3000):
        if steps.due:
            checks.append(steps.uses)
            simulated.check(steps)
        steps.uses += 1
    assert checks[:3] == [0, 1, 2]
    gaps = [b - a for a, b in pairwise(checks)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 512


# --- in the engine ----------------------------------------------------------------------------


def displacements(model, make_closure, **options):
    """How far the runs of one penalised step are from the weights, in units of the probe."""
    weight = next(model.parameters())
    before, seen = weight.detach().clone(), []
    closure = make_closure(model)

    def watched():
        with torch._C.DisableTorchFunction():  # to a mode, a detached weight is a constant
            seen.append((weight.detach() - before).abs().max().item())
        return closure()

    seht.HessianTrace(model, weight=0.1, engine="difference", seed=3, **options)(watched)
    assert torch.equal(weight, before)
    return seen


def other_loss(model):
    x, _ = batch(next(model.parameters()).dtype, seed=9)
    return lambda: 50 * model(x).exp().mean()


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_step_depends_on_weights_and_probe_alone(dtype, curvature):
    model = network(dtype=dtype)
    weights = torch.cat([w.flatten() for w in seht.probes.choose(model).tensors.values()])
    # A Rademacher probe is as long as the square root of its entries.
    e = START[curvature, dtype] * (weights.norm() / len(weights) ** 0.5).item()
    for make_closure in (closure_of, other_loss):
        seen = displacements(copy.deepcopy(model), make_closure, curvature=curvature)
        # The first use compares three steps; float32 rounds what is added to the weights.
        tolerance = 1e-2 if dtype == torch.float32 else 1e-6
        sizes = [pytest.approx(factor * e, rel=tolerance) for factor in (0, 0.5, 1, 2)]
        first = seen[: 7 if curvature == "hessian" else 4]  # a bad one is followed by others
        assert all(any(step == size for size in sizes) for step in first)
        assert all(any(step == size for step in seen) for size in sizes)


def test_the_step_scales_with_the_weights():
    model, larger = network(), network()
    with torch.no_grad():
        for w in larger.parameters():
            w.mul_(8)
    a, b = (displacements(m, closure_of) for m in (model, larger))
    assert b == pytest.approx([8 * e for e in a], rel=1e-6)


def test_one_step_for_all_drawn_tensors():
    model = network()
    tensors = list(seht.probes.choose(model).tensors.values())
    before, seen = [w.detach().clone() for w in tensors], []

    def closure():
        with torch._C.DisableTorchFunction():
            pairs = zip(tensors, before, strict=True)
            seen.append([(w.detach() - old).abs().mean().item() for w, old in pairs])
        return closure_of(model)()

    seht.hessian_trace(model, closure, engine="difference", kappa=0.01)
    assert seen[0] == [0.0] * 3
    for moved in seen[1:]:
        assert moved == pytest.approx([moved[0]] * 3)
        assert moved[0] > 0


@pytest.mark.parametrize("kappa", [0.0, -0.01, math.nan, math.inf])
def test_kappa_must_be_positive(kappa):
    with pytest.raises(ValueError, match="kappa must be a positive finite number"):
        seht.HessianTrace(network(), weight=0.1, kappa=kappa)


def test_a_given_kappa_is_kept():
    model = network(dtype=torch.float32)
    penalty = seht.HessianTrace(model, weight=0.1, engine="difference", kappa=0.05)
    for _ in range(4):
        penalty(closure_of(model))
    assert penalty.state_dict()["engine"]["kappa"] == 0.05
    assert penalty.last.error > 0.001  # and its error is known all the same


def test_kappa_belongs_to_the_difference_engine():
    with pytest.raises(ValueError, match="kappa is an option of engine='difference'"):
        seht.HessianTrace(network(), weight=0.1, engine="autograd", kappa=0.01)


# --- state ------------------------------------------------------------------------------------


def test_the_adapted_step_is_part_of_the_state():
    """An LSTM wants a larger step than the first one; a resumed run goes on with it."""
    lstm = problem("lstm")
    penalty = seht.HessianTrace(lstm.model, weight=1e-3, engine="difference", seed=3)
    for _ in range(5):
        penalty(lstm.closure)
    state = penalty.state_dict()
    assert state["engine"]["kappa"] > 2 * START["hessian", torch.float32]
    resumed = seht.HessianTrace(lstm.model, weight=1e-3, engine="difference", seed=3)
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.state_dict() == state
    for _ in range(12):  # a check falls into these
        assert torch.equal(penalty(lstm.closure), resumed(lstm.closure))
        assert penalty.last == resumed.last
    assert penalty.state_dict() == resumed.state_dict() != state


def test_plain_numbers_alone():
    steps = StepControl(kappa=0.01)
    Simulated(1.0, 1e-3, (2, 2)).check(steps)
    assert StepControl(**steps.state()) == steps
    assert all(isinstance(v, (bool, int, float, str, type(None))) for v in steps.state().values())


def test_a_given_step_is_not_lost_on_resuming():
    lstm = problem("lstm")
    adapted = seht.HessianTrace(lstm.model, weight=1e-3, engine="difference")
    adapted(lstm.closure)
    given = seht.HessianTrace(lstm.model, weight=1e-3, engine="difference", kappa=0.02)
    given.load_state_dict(adapted.state_dict())
    assert given.state_dict()["engine"]["kappa"] == 0.02
    adapted.load_state_dict(given.state_dict())
    assert not adapted.state_dict()["engine"]["fixed"]  # and goes on from there
