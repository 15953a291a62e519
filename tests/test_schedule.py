"""Warm-up and ramp in steps or as fractions, and what is said about them."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.errors import PenaltyWarning
from seht.strength.schedule import Schedule

x, y = torch.randn(8, 4), torch.arange(8) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def penalised(penalty, steps):
    """Which of so many steps have a trace."""
    found = []
    for _ in range(steps):
        penalty(lambda: F.cross_entropy(penalty.model(x), y)).backward()
        found.append(penalty.last.trace is not None)
    return found


@pytest.mark.parametrize("ramp, fraction", [(0, 0), (5, 0.25)])
def test_a_fraction_is_so_many_steps(ramp, fraction):
    steps = Schedule(every=2, warmup=3, ramp=ramp)
    share = Schedule(every=2, warmup=0.15, ramp=fraction, total_steps=20)
    found = [share.weight(0.1, step) for step in range(30)]
    assert found == [steps.weight(0.1, step) for step in range(30)]
    assert found[:3] == [0, 0, 0] and found[3] > 0 and found[4] == 0
    assert found[25] == 0.2


def test_whole_numbers_are_steps_also_of_a_training_of_known_length():
    assert Schedule(warmup=1, total_steps=50).plain_steps == 1


def test_the_penalty_follows_it():
    penalty = seht.HessianTrace(network(), weight=1e-3, warmup=0.5, total_steps=6)
    assert penalised(penalty, 6) == [False] * 3 + [True] * 3
    assert penalty.last.weight == 1e-3


def test_whoever_knows_the_length_may_tell_it():
    penalty = seht.HessianTrace(network(), weight=1e-3, warmup=0.5)
    copied = copy.deepcopy(penalty)
    penalty.lasts(100)
    penalty.lasts(4)  # another training
    assert penalised(penalty, 3) == [False, False, True]
    given = seht.HessianTrace(network(), weight=1e-3, warmup=0.5, total_steps=2)
    given.lasts(100)
    assert given.schedule.plain_steps == 1
    with pytest.raises(ValueError, match="total_steps=, the number of its optimiser steps"):
        copied(lambda: F.cross_entropy(copied.model(x), y))
    assert copied.step == 0
    with pytest.raises(ValueError, match="total_steps must be at least 1"):
        copied.lasts(0)


@pytest.mark.parametrize("name", ["warmup", "ramp"])
@pytest.mark.parametrize("value", [1.0, 500.0, -0.1, float("nan"), -1])
def test_lengths_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        seht.HessianTrace(network(), weight=1e-3, total_steps=10, **{name: value})


@pytest.mark.parametrize("value", [True, "0.1", None])
def test_lengths_of_another_type(value):
    with pytest.raises(TypeError, match="warmup must be a whole number"):
        seht.HessianTrace(network(), weight=1e-3, warmup=value)


def test_rare_steps_are_warned_of():
    with pytest.warns(PenaltyWarning, match="every=8 puts 8 times the weight.*every=4"):
        seht.HessianTrace(network(), weight=1e-3, every=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seht.HessianTrace(network(), weight=1e-3, every=4).lasts(10)


def test_a_training_that_ends_in_the_warm_up_is_said():
    penalty = seht.HessianTrace(network(), weight=1e-3, warmup=500)
    penalised(penalty, 3)
    with pytest.warns(PenaltyWarning, match="at step 3, within the warm-up of 500 steps"):
        penalty.close()
    with (
        pytest.warns(PenaltyWarning, match="within the warm-up"),
        seht.HessianTrace(network(), weight=1e-3, warmup=2) as short,
    ):
        penalised(short, 2)


HELD_OUT = ([(-x, y)], lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))


@pytest.mark.parametrize("options", [{"share": 2.0}, {"weight": "tuned", "held_out": HELD_OUT}, {}])
def test_a_training_too_short_to_measure_its_share_is_said(options):
    """The first eight penalised steps are charged nothing."""
    penalty = seht.HessianTrace(network(), warmup=2, every=2, **options)
    penalised(penalty, 2 + 14)
    said = "after 7 penalised steps, and 8 .* did nothing. Train longer, penalise more steps"
    with pytest.warns(PenaltyWarning, match=said):
        penalty.close()
    penalised(penalty, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penalty.close()


def test_nothing_is_said_otherwise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with seht.HessianTrace(network(), weight=1e-3, warmup=2) as penalty:
            penalised(penalty, 3)
        seht.HessianTrace(network(), weight=1e-3, warmup=2).close()  # it was never trained
        with pytest.raises(KeyError), seht.HessianTrace(network(), weight=1e-3, warmup=9) as other:
            penalised(other, 1)
            raise KeyError
