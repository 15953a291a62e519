"""The onset: a weight grows gradually, and shrinks for good where both losses get worse."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.strength.onset import LEAST, Onset


def parts(losses, allowed=1.0):
    """The part that applies after each look, with these running means of both losses."""
    onset, found = Onset(), []
    for looks, (train, held_out) in enumerate(losses, start=1):
        onset = onset.after(looks, train, held_out, allowed)
        found.append(onset.part)
    return found


def test_it_grows_by_a_half_up_to_what_is_allowed():
    whole = parts([(1.0, 1.5)] * 20)
    assert whole[:2] == [LEAST] * 2 and whole[-1] == 1
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(whole))
    assert parts([(1.0, 1.5)] * 20, allowed=0.3)[-1] == 0.3
    assert parts([(1.0, 1.0)] * 20, allowed=LEAST)[-1] == LEAST


def test_memorising_is_no_harm_and_neither_is_forgetting_wrong_labels():
    memorising = [(1 - 0.04 * k, 1.5 + 0.1 * k) for k in range(20)]
    assert parts(memorising)[-1] == 1
    forgetting = [(0.5 + 0.05 * k, 1.5 - 0.01 * k) for k in range(20)]
    assert parts(forgetting)[-1] == 1


def test_where_both_get_worse_it_goes_for_good():
    worse = [(0.5, 1.0)] * 14 + [(0.7, 1.3)] * 2 + [(0.4, 0.9)] * 10
    found = parts(worse)
    assert found[13] == 1 and found[14:16] == [0.5, 0.25]
    assert found[-1] == 0.25
    assert parts([(0.5, 1.0)] * 14 + [(0.7, 1.3)] * 8)[-1] == LEAST


def test_what_goes_wrong_without_it_is_no_reason():
    """The losses rise and fall by themselves while nothing is allowed; then there is a gap."""
    onset = Onset()
    for looks, loss in enumerate([1.0, 1.0, 1.0, 2.0, 2.0, 1.0], start=1):
        onset = onset.after(looks, loss, loss, LEAST)
    assert onset.most == 1
    for looks in range(7, 30):
        onset = onset.after(looks, 0.5, 1.0, 1.0)
    assert onset.part == 1


def test_losses_below_zero():
    assert parts([(-2.0, -1.0)] * 20)[-1] == 1
    assert parts([(-2.0, -1.0)] * 12 + [(-1.0, -0.5)] * 9)[-1] == LEAST


def test_a_tuned_weight_does_not_jump():
    """A network that has its forty examples by heart when the looks begin: a gap at once."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 8, generator=draw), torch.randint(0, 3, (240,), generator=draw)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    penalty = seht.HessianTrace(model, weight="tuned", warmup=0.2, total_steps=100)
    for _ in range(100):
        optimizer.zero_grad()
        penalty(
            lambda: F.cross_entropy(model(x[:40]), y[:40]),
            held_out=lambda: F.cross_entropy(model(x[40:]), y[40:]),
        ).backward()
        optimizer.step()
    weights = penalty.path.weights
    # The share moves besides, by a quarter in one look at most.
    assert all(b < 2 * a for a, b in itertools.pairwise(weights))
    assert max(weights) > 20 * weights[0]
