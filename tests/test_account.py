"""The guard rails: loud once when the objective runs away, silent on healthy noise."""

import dataclasses
import random
import warnings

import pytest
import torch
from helpers import closure_of, every_engine, network
from torch import nn

import seht
from seht.account import Guard

WEIGHT = 1e-3


def feed(guard, traces, *, loss=1.0, weight=WEIGHT, **more):
    """The warnings that these traces raise, and the step of the first."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = None
        for step, trace in enumerate(traces):
            guard.update(loss=loss, trace=trace, penalty=weight * trace, weight=weight, **more)
            if caught and first is None:
                first = step
    assert all(w.category is seht.PenaltyWarning for w in caught)
    return [str(w.message) for w in caught], first


def noisy(mean, count, seed, spread=1.0):
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


def test_a_trace_that_has_vanished_is_not_for_want_of_weight():
    """A network that the penalty has killed; a larger weight would not bring it back."""
    (said,), _ = feed(Guard(), [1e-20] * 200, loss=127.0, weight=0.1, steady=True)
    assert "has vanished" in said and "Lower the weight (now 0.1)" in said
    (said,), _ = feed(Guard(), [1.0] * 200, weight=1e-9, steady=True)
    assert "Raise the weight (now 1e-09)" in said


# --- loud -------------------------------------------------------------------------------------


def test_a_trace_that_drifts_below_zero_warns_once_with_the_fix():
    drift = [50 - 0.5 * k + noise for k, noise in enumerate(noisy(0, 1000, 0, spread=20))]
    said, first = feed(Guard(), drift, weight=1e-6)
    assert len(said) == 1
    assert 100 < first < 200  # the mean passes zero at step 100; the memory is 20 steps
    for word in (
        "below zero",
        "negative curvature",
        "1e-06",
        "warmup=",
        "limit=",
        'curvature="ggn"',
    ):
        assert word in said[0]


@pytest.mark.parametrize("mean", [-1.0, -2.0, -1780.0])
def test_negative_traces_are_noticed_through_noise_as_large_as_they(mean):
    for seed in range(50):
        said, first = feed(Guard(), noisy(mean, 200, seed, spread=abs(mean)), weight=1e-9)
        assert len(said) == 1 and first < 100


def test_a_penalty_that_outgrows_the_loss_warns_once_with_the_fix():
    said, first = feed(Guard(), [100.0 * 1.05**k for k in range(200)], loss=1.0, weight=1e-3)
    assert len(said) == 1
    assert 0.001 * 100 * 1.05**first > 1
    for word in ("outgrows the loss", "0.001", "warmup=", "limit=0.5"):
        assert word in said[0]


def test_a_weight_that_was_found_may_outgrow_the_loss():
    traces = [100.0 * 1.05**k for k in range(200)]
    said, _ = feed(Guard(), traces, loss=1.0, weight=1e-3, given=False)
    assert said == []


@pytest.mark.parametrize("how, silent", [({"weight": 10.0}, False), ({"share": 50.0}, True)])
def test_a_step_says_whether_its_weight_was_given(how, silent):
    model = network()
    penalty = seht.HessianTrace(model, curvature="ggn", seed=0, **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            penalty(closure_of(model))
    assert penalty.last.penalty > penalty.last.loss
    assert silent is not any("outgrows" in str(w.message) for w in caught)


def test_both_warnings_may_come():
    said, _ = feed(Guard(), noisy(-5000, 300, 1, spread=100))
    assert len(said) == 2


# --- silent -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "runs", "allowed"),
    [
        (0.25, 200, 0),  # one probe's scatter of 400 %: bound below 1e-4 a run
        (0.1, 200, 1),  # 1,000 %: below 0.1 % a run
        (0.0, 200, 3),  # no curvature at all: below 0.5 % a run of 2,000 steps
    ],
)
def test_healthy_noisy_traces_raise_no_alarm(mean, runs, allowed):
    alarms = sum(bool(feed(Guard(), noisy(mean, 2000, seed))[0]) for seed in range(runs))
    assert alarms <= allowed


def test_single_outliers_raise_no_alarm():
    for seed in range(20):
        traces = noisy(5, 500, seed)
        traces[100], traces[300] = -1e4, -1e6
        assert feed(Guard(), traces, weight=1e-9)[0] == []


def test_a_few_estimates_are_no_evidence():
    assert feed(Guard(), [-1.0] * 19, weight=1e-9) == ([], None)
    assert feed(Guard(), [-1.0] * 20, weight=1e-9)[1] == 19


def test_losses_of_zero_do_not_divide():
    guard = Guard()
    feed(guard, [0.0] * 30, loss=0.0)
    assert guard.penalty_over_loss == 0.0
    assert feed(guard, [1.0] * 30, loss=0.0)[0]


# --- state ------------------------------------------------------------------------------------


def test_the_running_means():
    guard = Guard()
    feed(guard, [1.0, 2.0, 6.0], loss=-2.0, weight=0.1)
    assert guard.trace == pytest.approx(3.0)  # a plain mean while the memory fills
    assert guard.spread == pytest.approx(14 / 3)
    assert guard.penalty_over_loss == pytest.approx(0.15)
    feed(guard, [10.0] * 1000, weight=0.01)
    assert guard.trace == pytest.approx(10.0)
    assert guard.trace_error == pytest.approx(0.0, abs=1e-6)
    assert guard.penalty_over_loss == pytest.approx(0.1)


def test_the_standard_error_is_that_of_the_running_mean():
    means, errors = [], []
    for seed in range(400):
        guard = Guard()
        feed(guard, noisy(3, 150, seed))
        means.append(guard.trace)
        errors.append(guard.trace_error)
    scatter = torch.tensor(means).std().item()
    assert sum(errors) / len(errors) == pytest.approx(scatter, rel=0.15)


class Bowl(nn.Module):
    """Its Hessian is ``curvature`` times the identity: every probe gives the same trace."""

    def __init__(self, curvature):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 2, dtype=torch.float64))
        self.curvature = curvature

    def loss(self):
        return self.curvature * self.weight.square().sum() / 2 + 10


@every_engine
def test_a_saddle_warns_once_at_the_user_s_line_and_a_resumed_run_stays_quiet(engine):
    def calls(penalty, count):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                penalty(model.loss)
        return [w for w in caught if "below zero" in str(w.message)]

    model = Bowl(-1.0)
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    assert calls(penalty, 15) == []
    twin = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    twin.load_state_dict(penalty.state_dict())
    assert dataclasses.asdict(twin.guard) == dataclasses.asdict(penalty.guard)
    (said,) = calls(twin, 15)  # it goes on counting where the other stopped
    assert said.filename == __file__
    heir = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    heir.load_state_dict(twin.state_dict())
    assert calls(heir, 40) == []
    assert heir.guard.count == 70 and heir.guard.trace == pytest.approx(-2, rel=1e-3)


@every_engine
def test_only_penalised_steps_count(engine):
    model = network(norm=False)
    penalty = seht.HessianTrace(model, weight=WEIGHT, every=3, warmup=2, engine=engine)
    for _ in range(9):
        penalty(closure_of(model))
    assert penalty.guard.count == 3
    assert penalty.guard.loss == pytest.approx(penalty.last.loss)


@every_engine
def test_a_healthy_training_run_is_quiet(engine):
    model = network()
    penalty = seht.HessianTrace(model, weight=1e-5, engine=engine, warmup=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error", seht.PenaltyWarning)
        for _ in range(60):
            optimizer.zero_grad()
            penalty(closure_of(model)).backward()
            optimizer.step()
    assert penalty.guard.count == 55


# --- another model ------------------------------------------------------------------------------


def heard(penalty, closure, steps=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            penalty(closure).backward()
    return [str(w.message) for w in caught if w.category is seht.PenaltyWarning]


@every_engine
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_a_closure_that_calls_another_model_is_told_once(engine, curvature):
    model, other = network(), network()
    mark = {"curvature": curvature, "boundary": None}
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, **mark)
    try:
        said = heard(penalty, closure_of(other), 3)
    except (RuntimeError, ValueError) as error:  # the Gauss-Newton trace needs outputs of the model
        assert curvature == "ggn" and "model" in str(error)
        return
    assert len(said) == 1 and "depends on none of the probed parameters" in said[0]
    assert penalty.last.trace == 0 and set(penalty.last.unused) == set(penalty.last.layers)


def test_few_layers_are_judged_when_all_have_been_drawn():
    model, other = network(), network()
    options = {"weight": WEIGHT, "estimator": "seht-d", "prob": 0.5, "seed": 1}
    assert len(heard(seht.HessianTrace(model, **options), closure_of(other), 20)) == 1
    half = nn.ModuleList([network(), network()])  # one of them is used
    assert not heard(seht.HessianTrace(half, **options), closure_of(half[0]), 20)


# --- too little to do anything ----------------------------------------------------------------


def test_a_penalty_that_does_nothing_is_said_once_with_the_fix():
    model = network(norm=False)
    penalty = seht.HessianTrace(model, weight=1e-9, curvature="ggn", ramp=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(140):
            penalty(closure_of(model))
    said = [str(w.message) for w in caught]
    assert len(said) == 1 and "too little" in said[0]
    for word in ("1e-09", "share=2", "weight='tuned'"):
        assert word in said[0]
    heir = seht.HessianTrace(model, weight=1e-9, curvature="ggn", ramp=30)
    heir.load_state_dict(penalty.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heir(closure_of(model))


@pytest.mark.parametrize(
    "options",
    [
        {"weight": lambda step: 1e-9},  # it may grow yet
        {"weight": 1e-9, "ramp": 1000},
        {"weight": 0.0},
        {"weight": 1e-3},
    ],
)
def test_nothing_is_said_of_a_penalty_that_may_do_something(options):
    model = network(norm=False)
    penalty = seht.HessianTrace(model, curvature="ggn", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            penalty(closure_of(model))


@pytest.mark.parametrize("share, said", [(0.03, "too little"), (8.0, "all there is")])
def test_shares_that_no_trial_supports(share, said):
    with pytest.warns(seht.PenaltyWarning, match=said):
        seht.HessianTrace(network(), share=share)
    if share > 1:
        with pytest.warns(seht.PenaltyWarning, match="most=8"):
            seht.HessianTrace(network(), weight=seht.Tuning(most=share))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seht.HessianTrace(network(), share=4)
        seht.HessianTrace(network(), weight="tuned")
