"""HessianTrace: what is added to the loss, on which step, from which probe."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import batch, closure_of, every_engine, gradient, network, records
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seht

WEIGHT = 0.01


def flat_gradient(scalar, model):
    parts = torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True)
    return torch.cat([p.flatten() for p in parts if p is not None])


# --- the number and its gradient --------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("estimator", ["seht-h", "seht-d"])
@pytest.mark.supports('`estimator="{estimator}"`')
def test_the_result_is_loss_plus_weight_times_trace(engine, estimator):
    options = {"probes": 2} | ({"layer_prob": 1.0, "prob": 0.3} if estimator == "seht-d" else {})
    model = network()
    closure = closure_of(model)
    penalty = seht.HessianTrace(model, weight=WEIGHT, estimator=estimator, engine=engine, **options)
    total = penalty(closure)
    assert total.shape == () and total.requires_grad
    got = flat_gradient(total, model)

    loss, trace = seht.loss_and_trace(
        model, closure, estimator=estimator, engine=engine, seed=penalty.last.seed, **options
    )
    assert trace != 0
    expected = loss + WEIGHT * trace
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(got, flat_gradient(expected, model), rtol=1e-9, atol=1e-12)
    assert penalty.last.loss == pytest.approx(loss.item(), rel=1e-12)
    assert penalty.last.trace == pytest.approx(trace.item(), rel=1e-12)
    assert penalty.last.penalty == pytest.approx(WEIGHT * trace.item(), rel=1e-12)


def test_the_engines_add_the_same():
    totals, gradients = [], []
    for engine in sorted(seht.engines.ENGINES):
        model = network(dropout=0.4)
        torch.manual_seed(11)
        total = seht.HessianTrace(model, weight=WEIGHT, engine=engine, seed=5)(closure_of(model))
        totals.append(total.detach())
        gradients.append(flat_gradient(total, model))
    for other, slope in zip(totals[1:], gradients[1:], strict=True):
        torch.testing.assert_close(other, totals[0], rtol=1e-6, atol=0)
        assert (slope - gradients[0]).norm() < 1e-5 * gradients[0].norm()


# --- which step -------------------------------------------------------------------------------

SCHEDULES = [
    ({}, [1, 1, 1, 1, 1, 1]),
    ({"warmup": 3}, [0, 0, 0, 1, 1, 1]),
    ({"every": 2}, [2, 0, 2, 0, 2, 0]),
    ({"warmup": 1, "every": 3}, [0, 3, 0, 0, 3, 0]),
    ({"ramp": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ({"warmup": 2, "ramp": 2}, [0, 0, 0.5, 1, 1, 1]),
    ({"warmup": 1, "ramp": 4, "every": 2}, [0, 0.5, 0, 1.5, 0, 2]),
]


@every_engine
@pytest.mark.parametrize(("schedule", "factors"), SCHEDULES)
@pytest.mark.supports("`warmup`, `every`, `ramp`")
def test_schedules(engine, schedule, factors):
    model = network(norm=False)
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, **schedule)
    seen = records(penalty, closure_of(model), 6)
    assert [r.step for r in seen] == list(range(6))
    assert [r.weight for r in seen] == pytest.approx([WEIGHT * f for f in factors])
    for record, factor in zip(seen, factors, strict=True):
        assert (record.trace is None) == (factor == 0)
        assert (record.engine, record.layers) == (
            (engine, ("0.weight", "5.weight", "7.weight")) if factor else (None, ())
        )
        if factor:
            assert record.penalty == pytest.approx(record.weight * record.trace)
        else:
            assert (record.penalty, record.seed) == (0.0, None)


@given(warmup=st.integers(0, 6), every=st.integers(1, 5), ramp=st.integers(0, 6))
def test_any_schedule(warmup, every, ramp):
    model = nn.Linear(2, 1).double()
    x = torch.ones(3, 2, dtype=torch.float64)
    penalty = seht.HessianTrace(
        model, weight=WEIGHT, warmup=warmup, every=every, ramp=ramp, engine="autograd"
    )
    for record in records(penalty, lambda: model(x).square().mean(), 12):
        since = record.step - warmup
        due = since >= 0 and since % every == 0
        assert (record.trace is not None) == due
        grown = min(1, (since + 1) / ramp) if ramp else 1
        assert record.weight == pytest.approx(WEIGHT * every * grown if due else 0)


@every_engine
def test_weight_as_a_function_of_the_step(engine):
    model = network(norm=False)
    asked = []

    def weight(step):
        asked.append(step)
        return 0.0 if step == 1 else WEIGHT * (step + 1)

    penalty = seht.HessianTrace(model, weight=weight, engine=engine, accumulate=2)
    seen = records(penalty, closure_of(model), 6)
    assert asked == [0, 0, 1, 1, 2, 2]
    assert [r.weight for r in seen] == pytest.approx([WEIGHT * k for k in (1, 1, 0, 0, 3, 3)])


@every_engine
def test_accumulation_shares_the_layers_of_a_step_and_not_its_entries(engine):
    model = network(norm=False)
    penalty = seht.HessianTrace(
        model, weight=WEIGHT, estimator="seht-d", prob=0.3, layer_prob=0.5, accumulate=3,
        engine=engine, warmup=1,
    )  # fmt: skip
    seen = records(penalty, closure_of(model), 30)
    assert [r.step for r in seen] == [call // 3 for call in range(30)]
    assert penalty.step == 10
    drawn = [r.layers for r in seen]
    assert all(len(set(drawn[k : k + 3])) == 1 for k in range(0, 30, 3))
    assert len(set(drawn)) > 2  # other steps, other layers
    traces = [{r.trace for r in seen[k : k + 3]} for k in range(3, 30, 3) if seen[k].layers]
    assert traces and all(len(values) == 3 for values in traces)


# --- limit ------------------------------------------------------------------------------------


@every_engine
@pytest.mark.supports("`limit`")
def test_limit_scales_the_penalty_by_a_detached_factor(engine):
    model = network()
    closure = closure_of(model)
    free = seht.HessianTrace(model, weight=10.0, seed=1, engine=engine)
    free(closure)
    assert abs(free.last.penalty) > free.last.loss  # or the limit would not bite

    held = seht.HessianTrace(model, weight=10.0, seed=1, limit=0.5, engine=engine)
    total = held(closure)
    assert held.last.trace == pytest.approx(free.last.trace, rel=1e-9)
    assert abs(held.last.penalty) == pytest.approx(0.5 * held.last.loss, rel=1e-9)
    assert total.item() == pytest.approx(held.last.loss + held.last.penalty, rel=1e-9)

    factor = held.last.penalty / held.last.trace
    got = flat_gradient(total, model)
    loss, trace = seht.loss_and_trace(model, closure, seed=held.last.seed, engine=engine)
    expected = flat_gradient(loss + factor * trace, model)
    # The last digit of the factor, on parts that are 1 / e^2 times as large as their sum.
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-7)


@every_engine
def test_a_limit_that_is_not_reached_changes_nothing(engine):
    model = network(norm=False)
    totals = [
        seht.HessianTrace(model, weight=1e-6, seed=1, limit=limit, engine=engine)(closure_of(model))
        for limit in (None, 0.5)
    ]
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-14, atol=0)


# --- what comes back --------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.supports("closures that return `(loss, aux)`")
def test_aux_comes_back(engine, warmup):
    model = network(norm=False)
    x, y = batch()

    def closure():
        logits = model(x)
        return F.cross_entropy(logits, y), {"logits": logits}

    total, aux = seht.HessianTrace(model, weight=WEIGHT, warmup=warmup, engine=engine)(closure)
    torch.testing.assert_close(aux["logits"], model(x))
    assert type(aux["logits"]) is torch.Tensor
    assert total.requires_grad
    assert (total.item() == F.cross_entropy(model(x), y).item()) == bool(warmup)


def test_the_record_is_frozen_and_detached():
    model = network()
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    assert penalty.last is None
    penalty(closure_of(model))
    names = ("step", "loss", "trace", "penalty", "weight", "layers", "engine", "seed", "error")
    values = dataclasses.asdict(penalty.last)
    assert set(names) <= values.keys()
    assert not any(isinstance(v, torch.Tensor) for v in values.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        penalty.last.loss = 0.0


@every_engine
def test_a_tensor_that_is_chosen_by_default_and_unused(engine):
    model = network(norm=False)
    model.extra = nn.Linear(3, 3).double()
    head = nn.Sequential(*list(model)[:-1])
    x, y = batch()
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, seed=2)
    penalty(lambda: F.cross_entropy(head(x), y)).backward()
    assert penalty.last.unused == ("extra.weight",)
    assert gradient(model)["extra.weight"] is None
    assert gradient(model)["0.weight"] is not None
    used = seht.HessianTrace(
        model, weight=WEIGHT, engine=engine, seed=2, params=["0.weight", "5.weight", "7.weight"]
    )
    used(lambda: F.cross_entropy(head(x), y))
    assert penalty.last.trace == pytest.approx(used.last.trace, rel=1e-9)


def test_params_may_be_a_generator():
    model = network(norm=False)
    names = (name for name in ("0.weight", "7.weight"))
    penalty = seht.HessianTrace(model, weight=WEIGHT, params=names)
    for record in records(penalty, closure_of(model), 2):
        assert record.layers == ("0.weight", "7.weight")


def test_a_record_prints_as_a_line():
    said = seht.StepRecord(3, 0.5, 20.0, 0.02, 1e-3, ("a", "b"), "difference", 1, 0.001)
    line = "step 3: loss 0.5 + penalty 0.02 (weight 0.001 * trace 20, error 0.1%) over 2 tensors"
    assert str(said) == f"{line}, engine difference"
    assert str(seht.StepRecord(1_000, 0.25)) == "step 1,000: loss 0.25, without a penalty"
