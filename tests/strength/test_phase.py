"""How much of a tuned weight applies: learning, memorising, memorising in spite of it, harm."""

import itertools
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.strength.phase import LEAST, Phase


def went(losses, allowed=1.0):
    """After each look, with these running means of both losses."""
    phase, found = Phase(), []
    for looks, (train, held_out) in enumerate(losses, start=1):
        phase = phase.after(looks, train, held_out, allowed)
        found.append(phase)
    return found


def parts(losses, allowed=1.0):
    return [phase.part for phase in went(losses, allowed)]


def memorising(k):
    """40 looks of learning, then the training loss falls alone."""
    return 2.3 - k / 100, 2.3 - min(k, 40) / 100 + max(0, k - 60) / 100


MEMORISED = [memorising(k) for k in range(150)]
"""At the end the training loss is 0.81 and the held-out loss 2.79, from a lowest of 1.9."""


def test_while_the_held_out_loss_falls_nothing_grows():
    """A pretrained network that knows its examples by heart: the gap is whole all along. Its
    held-out batches are not equally hard, so that the mean has ripples, and the first few may be
    easy ones.
    """
    falling = [(0.5 * 0.9**k, 0.7 - 0.005 * k + 0.02 * (k % 3)) for k in range(40)]
    assert parts(falling) == [LEAST] * 40
    assert parts([(0.5, 0.3)] * 5 + falling) == [LEAST] * 45


def test_memorising_makes_it_grow_by_a_half_up_to_what_is_allowed():
    found = parts(MEMORISED)
    assert found[:50] == [LEAST] * 50 and found[60] == 1 == found[-1]
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(found))
    assert parts(MEMORISED, allowed=0.3)[-1] == 0.3
    assert parts(MEMORISED, allowed=LEAST)[-1] == LEAST


@pytest.mark.parametrize(("looks", "pace"), [(None, 1.0), (400, 1.0), (100, 1.0), (45, 0.45)])
def test_in_a_short_training_it_grows_slowly(looks, pace):
    """A fine-tuning has the last third of its 45 looks to grow in. As fast as in a long one it came
    to the whole before the running means, of twenty looks, could show what that does.
    """
    assert seht.Tuning().pace(looks) == pace
    phase, grown = Phase(), []
    for k, losses in enumerate(MEMORISED, start=1):
        phase = phase.after(k, *losses, 1.0, pace)
        grown += [k] if LEAST < phase.part < 1 else []
    assert phase.part == 1
    assert len(grown) == math.ceil(math.log(1 / LEAST) / math.log(1.5) / pace) - 1


def test_success_is_no_reason_to_shrink():
    """Once it is at work the held-out loss falls, below its lowest, and the penalty stays."""
    found = parts(MEMORISED[:70] + [(1.8, 1.95 - 0.01 * k) for k in range(60)])
    assert found[69] == 1 == found[-1]


@pytest.mark.parametrize("lowest", [2.3, 1.0])
def test_a_penalty_that_undoes_memorising_does_no_harm(lowest):
    """Small photographs: both losses are clearly above their lowest ever, and the held-out loss
    falls.
    """
    early = [(2.3, lowest)] * 10
    undone = [(0.81 + k / 50, 2.79 - k / 100) for k in range(40)]
    found = went(early + MEMORISED + undone)
    assert found[-1].part == 1 and not found[-1].harmed
    assert undone[-1][1] > 1.05 * min(lowest, 1.9)


def test_where_both_get_worse_it_goes_for_good():
    worse = [(0.5, 1.0)] * 40 + [(0.7, 1.3)] * 2 + [(0.4, 0.9)] * 10
    found = parts(worse)
    assert found[39] == 1 and found[40:42] == [0.5, 0.25]
    assert found[-1] == 0.25 and went(worse)[-1].harmed
    assert parts([(0.5, 1.0)] * 40 + [(0.7, 1.3)] * 8)[-1] == LEAST


def test_what_goes_wrong_without_it_is_no_reason():
    """The losses rise and fall by themselves while nothing is allowed; then there is a gap."""
    phase = Phase()
    for looks, loss in enumerate([1.0] * 15 + [2.0] * 15 + [1.0] * 2, start=1):
        phase = phase.after(looks, loss, loss, LEAST)
    assert not phase.harmed
    for looks in range(33, 70):
        phase = phase.after(looks, 0.5, 1.0, 1.0)
    assert phase.part == 1


def test_losses_below_zero():
    assert parts([(-2.0, -1.0)] * 40)[-1] == 1
    assert parts([(-2.0, -1.0)] * 40 + [(-1.0, -0.5)] * 9)[-1] == LEAST


FALLING = lambda k: 2.3 - k / 100


@pytest.mark.parametrize(
    ("train", "held_out", "lifted"),
    [
        (FALLING, lambda k: 2.3, False),
        (FALLING, FALLING, False),
        (FALLING, lambda k: 2.3 * (1.04 if k > 50 else 1), False),
        (FALLING, lambda k: 2.3 * (1.1 if k > 50 else 1), True),
        (lambda k: -1 - k / 100, lambda k: -1.0 * (0.9 if k > 50 else 1), True),
        (lambda k: 2.3 + k / 100, lambda k: 2.3 + k / 100, False),  # a penalty that is too strong
        (FALLING, lambda k: 5.0 if k < 50 else 2.3, False),
    ],
)
def test_memorising_in_spite_of_it_lifts_the_bound(train, held_out, lifted):
    found = went([(train(k), held_out(k)) for k in range(150)])
    assert found[-1].lifted is lifted
    assert not any(phase.lifted for phase in found[:10])
    assert Phase(**asdict(found[-1])) == found[-1]


def test_a_lifted_bound_falls_for_good_where_it_does_harm():
    worse = [(0.81 + k / 50, 2.79 + k / 50) for k in range(20)]
    found = went(MEMORISED + worse + MEMORISED[-20:])
    assert found[149].lifted and not found[-1].lifted and found[-1].harmed
    assert math.isfinite(found[-1].then)


def test_a_tuned_weight_does_not_jump():
    weights = tuned_by_heart("tuned")
    # The share moves besides, by a quarter in one look at most.
    assert all(b < 2 * a for a, b in itertools.pairwise(weights))
    assert max(weights) > 20 * weights[0]


def test_eighty_looks_grow_at_four_fifths_of_the_pace():
    weights = tuned_by_heart(seht.Tuning(travel=1e-9))  # the share stays where it is
    rises = [b / a for a, b in itertools.pairwise(weights)]
    assert max(rises) == pytest.approx(1.5**0.8)


def tuned_by_heart(weight):
    """A network that has its forty examples by heart when the looks begin: a gap at once."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 8, generator=draw), torch.randint(0, 3, (240,), generator=draw)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    penalty = seht.HessianTrace(model, weight=weight, warmup=0.2, total_steps=100)
    for _ in range(100):
        optimizer.zero_grad()
        penalty(
            lambda: F.cross_entropy(model(x[:40]), y[:40]),
            held_out=lambda: F.cross_entropy(model(x[40:]), y[40:]),
        ).backward()
        optimizer.step()
    return penalty.path.weights
