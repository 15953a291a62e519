"""The rule of the tuned weight: bounded, led home from a wrong start, calm under noise."""

import math
import random
import warnings
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.strength.phase import Phase
from seht.strength.tuning import Position

LOOKS = 150


def went(cosines, tuning=seht.Tuning(), lifts=lambda number: Phase()):  # noqa: B008  frozen
    """The shares that a training with these looks has."""
    position, found = Position(math.log(tuning.home)), []
    for number, cosine in enumerate(cosines):
        found.append(position.share(tuning))
        rate = tuning.rate(len(cosines), 1 - number / len(cosines))
        position = position.moved(cosine, rate, tuning, lifts(number))
    return [*found, position.share(tuning)]


def test_looks_that_all_say_more_do_not_run_away():
    """The prototype's weight of 900."""
    shares = went([0.3] * 10_000)
    assert max(shares) == pytest.approx(4.0) == shares[-1]


def test_the_bound_is_lifted_for_a_time():
    while_it_rises = lambda number: Phase(lifted=100 <= number < 150)
    shares = went([0.3] * 300, lifts=while_it_rises)
    assert shares[100] == pytest.approx(4.0) and max(shares[101:150]) > 8
    assert max(shares) <= 16 * (1 + 1e-9)
    assert shares[151:] == [shares[151]] * len(shares[151:])  # it neither jumps back nor goes on
    assert went([0.3] * 150 + [-0.3] * 150, lifts=while_it_rises)[-1] < 4
    failing = lambda number: Phase(lifted=100 <= number < 150, most=0.5 if number >= 200 else 1.0)
    assert went([0.3] * 300, lifts=failing)[201] == pytest.approx(4.0)
    never = went([0.3] * 300, seht.Tuning(beyond=1), lifts=lambda number: Phase(lifted=True))
    assert max(never) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="beyond must be 1"):
        seht.Tuning(beyond=0.5)


def test_looks_that_all_say_less_take_the_penalty_away():
    """As in a training that underfits: what is left does nothing."""
    shares = went([-0.1] * LOOKS)
    assert shares[LOOKS // 3] < 0.3 and shares[-1] < 0.03
    assert min(went([-0.1] * 10_000)) >= seht.Tuning().least * 0.999


@pytest.mark.parametrize("start", [0.03, 30.0])
def test_a_wrong_start_is_led_home(start):
    """A hundred times too small, ten times too large, with the looks of one training."""
    draw = random.Random(1)
    cosines = [draw.gauss(0.03, 0.12) for _ in range(LOOKS)]
    right, wrong = went(cosines), went(cosines, seht.Tuning(start=start))
    assert wrong[0] == pytest.approx(min(start, 4.0))
    assert all(1 / 3 < a / b < 3 for a, b in zip(wrong[20:], right[20:], strict=True))
    assert wrong[25:] == right[25:]


def test_sixty_held_out_examples_are_mostly_noise():
    """Cosines as they were measured on digits with 40 % of the labels replaced, and without a
    signal at all: the weight stays in the order of magnitude that it began with.
    """
    for mean in (0.03, 0.0):
        ends = []
        for seed in range(200):
            draw = random.Random(seed)
            ends.append(went([draw.gauss(mean, 0.12) for _ in range(LOOKS)])[-1])
        assert 1 < median(ends) <= 4
        assert sum(end < 0.3 for end in ends) <= 10


def test_a_training_of_unknown_length_moves_at_a_fixed_rate():
    tuning = seht.Tuning()
    before = Position(0.0)
    step = before.moved(1.0, tuning.rate(None, 1.0), tuning, Phase()).log_share
    assert step == pytest.approx(0.05)


# --- on a network -----------------------------------------------------------------------------


def problem(seed=0, wrong=0.4):
    """Two clouds in ten dimensions, a part of whose labels is drawn anew; 60 held out."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(180) % 3
    x = torch.randn(180, 10, generator=generator) + 1.5 * F.one_hot(y, 10)
    drawn = torch.rand(180, generator=generator) < wrong
    y = torch.where(drawn, torch.randint(0, 3, (180,), generator=generator), y)
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)), x, y


def train(weight, steps=240, lr=0.1, **problem_options):
    """The penalty, and the loss on clean examples."""
    model, x, y = problem(**problem_options)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    penalty = seht.HessianTrace(
        model, weight=weight, curvature="ggn", every=2, warmup=0.1, total_steps=steps, seed=0
    )
    for step in range(steps):
        rows = torch.arange(40) + 40 * (step % 3)
        optimizer.zero_grad()
        more = {} if weight == 0 else {"held_out": lambda: F.cross_entropy(model(x[120:]), y[120:])}
        penalty(lambda: F.cross_entropy(model(x[rows]), y[rows]), **more).backward()
        optimizer.step()
    right = torch.arange(1500) % 3
    with torch.no_grad():
        clean = torch.randn(1500, 10, generator=torch.Generator().manual_seed(7))
        return penalty, F.cross_entropy(model(clean + 1.5 * F.one_hot(right, 10)), right).item()


@pytest.mark.parametrize("gap", [0.0, 0.2])
@pytest.mark.parametrize("wrong", [0.4, 0.0])
def test_every_start_ends_in_the_same_place(wrong, gap):
    ends = []
    for start in (0.03, 3.0, 30.0):
        penalty, loss = train(seht.Tuning(start=start, gap=gap), wrong=wrong)
        unit = penalty.path.weights[0] / min(start, 4.0) / (0.02 if gap else 1.0)
        assert max(penalty.path.weights) <= 16.0 * unit * (1 + 1e-9)
        assert math.isfinite(loss)
        ends.append(penalty.path.weights[-1])
    assert max(ends) < 3 * min(ends), ends


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
def test_sixty_held_out_examples_and_the_prototype_s_weight_of_900(seed):
    """Where labels are wrong it gains on clean examples; without its bound, from a start far too
    large, the network is lost.
    """
    _, without = train(0.0, lr=0.03, seed=seed)
    penalty, tuned = train(seht.Tuning(beyond=1), lr=0.03, seed=seed)
    assert tuned < 0.9 * without, (tuned, without)
    bounded, large = train(seht.Tuning(start=300.0, beyond=1), lr=0.03, seed=seed)
    assert large < 0.9 * without and max(bounded.path.weights) < 3 * max(penalty.path.weights)
    free = seht.Tuning(start=300.0, home=300.0, most=1e4, gap=0.0)
    with pytest.warns(seht.PenaltyWarning, match="all there is"):
        free, lost = train(free, lr=0.03, seed=seed)
    assert max(free.path.weights) > 50 * max(bounded.path.weights) and lost > 2 * without


def test_clipping_and_accumulation_beside_it():
    """Clipped gradients in accumulated steps: the weight of a step is one for its calls."""
    model, x, y = problem()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    penalty = seht.HessianTrace(
        model,
        weight=seht.Tuning(gap=0.0),
        curvature="ggn",
        total_steps=20,
        accumulate=2,
        optimizer=optimizer,
    )
    for _ in range(20):
        optimizer.zero_grad()
        weights = []
        for half in (x[:60], x[60:120]):
            labels = y[:60] if half is x[:60] else y[60:120]
            loss = penalty(
                lambda: F.cross_entropy(model(half), labels),
                held_out=lambda: F.cross_entropy(model(x[120:]), y[120:]),
            )
            (loss / 2).backward()
            weights.append(penalty.last.weight)
        assert weights[0] == weights[1]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert penalty.step == 20 and len(penalty.path.weights) == 20 - 8 + 1
    assert len(set(penalty.path.weights)) > 2


@pytest.mark.parametrize("divided", [False, True])
def test_losses_of_two_units_are_said(divided):
    """A closure that divides its loss for accumulation beside a held-out loss that does not."""
    model, x, y = problem(wrong=0.0)
    penalty = seht.HessianTrace(model, weight="tuned", total_steps=12, accumulate=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in range(48):
            rows = torch.arange(30) + 30 * (call % 4)
            penalty(
                lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows]) / (4 if divided else 1),
                held_out=lambda: F.cross_entropy(model(x[120:]), y[120:]),
            ).backward()
    told = [str(w.message) for w in said if "4 times the training loss" in str(w.message)]
    assert len(told) == divided, told


@pytest.mark.parametrize("trained_on", [True, False])
def test_a_weight_that_waited_to_the_end_says_so(trained_on):
    """Held-out examples that are trained on, in other batches, look like nothing to gain."""
    model, x, y = problem(wrong=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    known = 120 if trained_on else 60
    batches = [(x[k : k + 20], y[k : k + 20]) for k in range(0, known, 20)]
    held_out = batches[3:] + batches[:3] if trained_on else [(x[60:120], y[60:120])]
    loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with seht.HessianTrace(
            model, total_steps=120, held_out=(held_out, loss_fn), optimizer=optimizer, seed=0
        ) as penalty:
            for step in range(120):
                optimizer.zero_grad()
                penalty(lambda step=step: loss_fn(model, batches[step % len(batches)])).backward()
                optimizer.step()
    told = [str(w.message) for w in said if "stayed at a fiftieth" in str(w.message)]
    assert len(told) == trained_on, (told, penalty.path)


@pytest.mark.parametrize(
    ("steps", "every", "short"), [(60, 1, True), (120, 1, False), (120, 2, True)]
)
def test_a_training_too_short_to_be_tuned_in_says_so_before_the_weight_moves(steps, every, short):
    """A fine-tuning of 100 steps cannot find it; one lost ten points when it grew as ever."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(2, 8, 3), torch.randint(0, 2, (2, 8))
    penalty = seht.HessianTrace(
        model, weight="tuned", every=every, total_steps=steps, seed=0,
        held_out=([(x[1], y[1])], lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(9 * every):
            penalty(lambda: F.cross_entropy(model(x[0]), y[0])).backward()
    found = [str(w.message) for w in said if "looks at the held-out loss" in str(w.message)]
    assert len(found) == short
    if short:
        assert f"has {60} looks" in found[0] and "Give share=2" in found[0]
