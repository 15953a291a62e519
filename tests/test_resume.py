"""HessianTrace as an object: saved, resumed, copied, held by a model, used by any optimiser."""

import copy
import pickle

import pytest
import torch
from helpers import Snapshot, closure_of, every_engine, network
from torch import nn

import seht

WEIGHT = 0.01


def train(model, optimizer, penalty, steps):
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        penalty(closure_of(model)).backward()
        optimizer.step()
        out.append(penalty.last)
    return out


def start(engine, **options):
    model = network()
    penalty = seht.HessianTrace(
        model, weight=WEIGHT, engine=engine, estimator="seht-d", prob=0.3, layer_prob=0.5, **options
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), penalty


@every_engine
@pytest.mark.supports("resuming from `state_dict`")
def test_a_resumed_run_draws_the_same_probes(engine, tmp_path):
    model, optimizer, penalty = start(engine, seed=5)
    whole = train(model, optimizer, penalty, 8)
    expected = Snapshot(model)

    first = start(engine, seed=5)
    train(*first, 3)
    parts = {"model": first[0], "optimizer": first[1], "penalty": first[2]}
    torch.save({k: v.state_dict() for k, v in parts.items()}, tmp_path / "run.pt")

    saved = torch.load(tmp_path / "run.pt")  # weights_only: the state is plain data
    second = start(engine, seed=99)  # the state brings its own seed
    for part, name in zip(second, parts, strict=True):
        part.load_state_dict(saved[name])
    assert second[2].step == 3
    rest = train(*second, 5)
    assert rest == whole[3:]
    assert any(r.layers for r in rest)
    Snapshot(second[0]).assert_same(expected, random=False)


@every_engine
def test_without_the_state_the_run_would_differ(engine):
    model, optimizer, penalty = start(engine, seed=5)
    whole = train(model, optimizer, penalty, 6)
    fresh = start(engine, seed=5)
    assert [r.layers for r in train(*fresh, 3)] != [r.layers for r in whole[3:]]


def test_state_in_the_middle_of_an_accumulated_step():
    model = network(norm=False)
    one = seht.HessianTrace(model, weight=WEIGHT, accumulate=3, seed=1)
    for _ in range(4):
        one(closure_of(model))
    two = seht.HessianTrace(model, weight=WEIGHT, accumulate=3, seed=2)
    two.load_state_dict(one.state_dict())
    for penalty in (one, two):
        penalty(closure_of(model))
    assert one.last == two.last and one.last.step == 1


def test_a_state_that_is_none_changes_nothing():
    penalty = seht.HessianTrace(network(), weight=WEIGHT, seed=1)
    before = penalty.state_dict()
    good = seht.HessianTrace(network(), weight=WEIGHT, seed=2).state_dict()
    for state, error in (
        ({}, ValueError),
        (None, ValueError),
        ({k: v for k, v in good.items() if k != "seed"}, ValueError),
        (good | {"calls": -1}, ValueError),
        (good | {"calls": "3"}, TypeError),
        (good | {"seed": 1.5}, TypeError),
    ):
        with pytest.raises(error):
            penalty.load_state_dict(state)
        assert penalty.state_dict() == before


@every_engine
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("weight", [0.0, WEIGHT])
@pytest.mark.supports("copies and pickles of the penalty")
def test_copies_and_pickles(engine, copier, weight):
    model = network()
    penalty = seht.HessianTrace(model, weight=weight, seed=4, engine=engine, params=["*.weight"])
    penalty(closure_of(model))  # a graph is alive, which no pickle can hold
    twin = copier(penalty)
    assert twin.last == penalty.last
    assert twin.model is not model
    for each in (penalty, twin):
        each(closure_of(each.model))
    assert twin.last == penalty.last and twin.step == 2


@every_engine
def test_a_model_may_hold_its_penalty(engine):
    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.penalty = seht.HessianTrace(self, weight=WEIGHT, seed=0, engine=engine)

    learner = Learner()
    assert not isinstance(learner.penalty, nn.Module)
    assert set(learner.state_dict()) == {f"net.{name}" for name in network().state_dict()}
    assert len(list(learner.modules())) == 1 + len(list(network().modules()))
    learner.penalty(closure_of(learner.net)).backward()
    twin = copy.deepcopy(learner)
    assert twin.penalty.model is twin
    twin.penalty(closure_of(twin.net))
    learner.penalty(closure_of(learner.net))
    assert twin.penalty.last == learner.penalty.last


@every_engine
@pytest.mark.supports("optimisers that call the closure (L-BFGS)")
def test_lbfgs_calls_the_closure_itself(engine):
    model = network(norm=False)
    penalty = seht.HessianTrace(model, weight=1e-4, engine=engine, accumulate=10**6, seed=0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        total = penalty(closure_of(model))
        total.backward()
        return total

    before = closure_of(model)().item()
    optimizer.step(closure)
    assert penalty.step == 0 and penalty.last.trace is not None
    assert closure_of(model)().item() < before


def test_repr_names_the_settings():
    text = repr(seht.HessianTrace(network(), weight=WEIGHT, estimator="seht-d", engine="autograd"))
    for part in ("Sequential", "0.01", "SehtD", "autograd"):
        assert part in text
