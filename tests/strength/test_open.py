"""HessianTrace(model) with nothing said: a share, or tuned where held-out data come in time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht

X, Y = torch.randn(64, 6), torch.randint(0, 3, (64,))
XV, YV = torch.randn(32, 6), torch.randint(0, 3, (32,))
BATCHES = [(XV[:16], YV[:16]), (XV[16:], YV[16:])]
STEPS = 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(model, penalty, steps=STEPS, **more):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        penalty(lambda: loss_fn(model, (X, Y)), **more).backward()
        optimizer.step()
    return penalty.path, copy.deepcopy(model.state_dict())


def held_out(model):
    return lambda: loss_fn(model, (XV, YV))


def is_tuned(penalty):
    return "weight='tuned'" in repr(penalty)


@pytest.mark.parametrize("where", ["made", "equipped", "called"])
@pytest.mark.parametrize("options", [{}, {"curvature": "ggn"}, {"warmup": 3}], ids=str)
def test_held_out_data_make_it_tuned_wherever_they_come(where, options):
    options = {**options, "total_steps": STEPS, "seed": 1}
    model = network()
    truth = seht.HessianTrace(model, weight="tuned", **options)
    expected = trained(model, truth, held_out=held_out(model))
    model = network()
    made = {"held_out": held_out(model)} if where == "made" else {}
    penalty = seht.HessianTrace(model, **options, **made)
    if where == "equipped":
        assert not is_tuned(penalty)
        penalty.equip(held_out=held_out(model))
    found = trained(model, penalty, **({"held_out": held_out(model)} if where == "called" else {}))
    assert is_tuned(penalty) and found[0] == expected[0] is not None
    assert all(torch.equal(a, found[1][k]) for k, a in expected[1].items())


def test_a_first_call_that_fails_leaves_it_open():
    model = network()
    penalty = seht.HessianTrace(model)
    for bad in (lambda: 1 / 0, None):
        with pytest.raises((ZeroDivisionError, TypeError)):
            penalty(bad, held_out=held_out(model))
        assert not is_tuned(penalty)
    with pytest.raises(TypeError, match="held_out must be"):
        penalty.equip(held_out=XV)
    assert not is_tuned(penalty)
    trained(model, penalty)
    assert penalty.last.weight > 0 and penalty.path is None


def test_held_out_data_that_come_too_late_are_refused():
    model = network()
    penalty = seht.HessianTrace(model, warmup=1)
    trained(model, penalty, 2)
    for late in (
        lambda: penalty.equip(held_out=held_out(model)),
        lambda: penalty(lambda: loss_fn(model, (X, Y)), held_out=held_out(model)),
    ):
        with pytest.raises(ValueError, match="after the first penalised step"):
            late()
    assert penalty.step == 2 and not is_tuned(penalty)


def test_a_share_that_was_said_stays():
    for options in ({"share": 2.0}, {"follow": True}):
        penalty = seht.HessianTrace(network(), **options)
        with pytest.raises(ValueError, match="share of its own"):
            penalty.equip(held_out=held_out(penalty.model))


@pytest.mark.parametrize("stop", [4, 12], ids=["measuring", "tuned"])
def test_a_tuned_state_is_taken_over_before_the_held_out_data_come(stop):
    """As Lightning does; the batch that was next is the next one."""
    ends = []
    options = {"total_steps": STEPS, "warmup": 1}
    for cut in (False, True):
        model = network()
        penalty = seht.HessianTrace(model, **options, seed=1)
        penalty.equip(held_out=(BATCHES, loss_fn))
        trained(model, penalty, stop)
        if cut:
            state = copy.deepcopy(penalty.state_dict())
            penalty = seht.HessianTrace(model, **options, seed=2)
            penalty.load_state_dict(state)
            assert is_tuned(penalty) and str(penalty.state_dict()) == str(state)
            penalty.equip(held_out=(BATCHES, loss_fn))
        ends.append((trained(model, penalty, STEPS - stop), penalty.state_dict()["strength"]))
    (path, weights), strength = ends[0]
    assert ends[1][0][0] == path and str(ends[1][1]) == str(strength)
    assert strength["read"] % len(BATCHES) == 1  # an odd number: the order matters
    assert all(torch.equal(a, ends[1][0][1][k]) for k, a in weights.items())


def test_a_state_of_the_share_is_not_gone_on_with_as_tuned():
    model = network()
    penalty = seht.HessianTrace(model)
    trained(model, penalty)
    again = seht.HessianTrace(model, held_out=(BATCHES, loss_fn))
    with pytest.raises(ValueError, match="belongs to a share weight"):
        again.load_state_dict(penalty.state_dict())
    again = seht.HessianTrace(model)
    again.load_state_dict(penalty.state_dict())
    with pytest.raises(ValueError, match="after the first penalised step"):
        again.equip(held_out=(BATCHES, loss_fn))
