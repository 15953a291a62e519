"""The gap: a weight that finds no gap between held-out and training loss falls away."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.strength.phase import Gap

GAP = seht.Tuning().gap


def after(train, held_out, looks=60, noise=0.0):
    """The factors of a training with these losses, functions of its part."""
    draw, gap, found = random.Random(0), Gap(), []
    for k in range(looks):
        part = k / looks
        gap = gap.after(train(part) + draw.gauss(0, noise), held_out(part))
        found.append((part, gap.factor(GAP)))
    return found


def test_without_a_gap_there_is_no_weight():
    found = after(lambda part: 1.0 - part / 2, lambda part: 1.0 - part / 2)
    assert all(factor == 0.02 for _, factor in found)


def test_the_noise_of_single_batches_is_no_gap():
    """Batches whose losses scatter by a fifth, and no difference in the mean."""
    found = after(lambda part: 1.0, lambda part: 1.0, looks=1000, noise=0.2)
    assert sum(factor > 0.02 for _, factor in found) < 10


def test_with_a_gap_the_weight_is_whole():
    """Digits with wrong labels: none at first, then a fifth and more of the held-out loss."""
    found = after(lambda part: 1.6 - part, lambda part: 1.6 - 0.1 * part, looks=150, noise=0.2)
    assert found[10][1] == 0.02 and found[-1][1] == 1


def test_where_the_losses_meet_again_it_goes():
    found = after(lambda part: 0.3 if part < 0.5 else 1.0, lambda part: 1.0, looks=300)
    assert found[140][1] == 1 and found[-1][1] == 0.02


def test_a_small_gap_may_be_the_choice_of_examples():
    found = after(lambda part: 0.92, lambda part: 1.0)
    assert found[-1][1] == 0.02
    half = after(lambda part: 0.85, lambda part: 1.0)
    assert half[-1][1] == pytest.approx(0.5)


def test_losses_below_zero_and_no_look_at_all():
    found = after(lambda part: -2.0, lambda part: -1.0)
    assert found[-1][1] == 1
    assert Gap().factor(GAP) == 0.02 and Gap(50, 1.0, 1.0, 0.0).factor(0) == 1


def test_looks_without_a_gap_do_not_move_the_weight():
    """It is at its start when it is needed, and what is seen then moves it."""
    assert not Gap(50, 1.0, 1.0, 0.0).counts(GAP) and Gap(50, 0.5, 1.0, 0.25).counts(GAP)
    still, free = (path(seht.Tuning(gap=gap), fresh=True) for gap in (GAP, 0.0))
    low, high = min(still), max(still)
    assert high / low < 1.001 and max(free) / min(free) > 1.5


@pytest.mark.parametrize("fresh", [True, False])
def test_examples_that_never_come_back_are_not_penalised(fresh):
    """A network that memorises is."""
    weights = path("tuned", fresh=fresh)
    free = path(seht.Tuning(gap=0.0), fresh=fresh)
    assert weights[0] == pytest.approx(0.02 * free[0])
    part = max(weights) / free[0]
    assert part == pytest.approx(0.02) if fresh else part > 0.3


def path(weight, *, fresh):
    """The weights of a training on new examples in each step, or on forty and again the same."""
    draw = torch.Generator().manual_seed(0)
    teacher = torch.randn(8, 3, generator=draw)

    def examples(count):
        x = torch.randn(count, 8, generator=draw)
        y = (x @ teacher).argmax(1)
        wrong = torch.rand(count, generator=draw) < 0.4
        return x, torch.where(wrong, torch.randint(0, 3, (count,), generator=draw), y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = examples(40)
    xv, yv = examples(1000)
    penalty = seht.HessianTrace(
        model, weight=weight, every=2, warmup=0.1, total_steps=160, optimizer=optimizer, seed=0
    )
    for _ in range(160):
        if fresh:
            x, y = examples(40)
        optimizer.zero_grad()
        held_out = lambda: F.cross_entropy(model(xv), yv)
        penalty(lambda: F.cross_entropy(model(x), y), held_out=held_out).backward()
        optimizer.step()
    return penalty.path.weights
