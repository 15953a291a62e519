"""The path of a weight: interpolated, constant outside, written down and read back."""

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht


def test_between_and_beyond_its_points():
    path = seht.WeightPath((0.2, 0.4, 0.8), (1e-4, 1e-2, 1e-3))
    assert path.at(0.0) == path.at(0.2) == 1e-4
    assert path.at(0.3) == pytest.approx(1e-3)  # half way in the logarithm
    assert path.at(0.6) == pytest.approx(math.sqrt(1e-2 * 1e-3))
    assert path.at(0.8) == path.at(1.0) == path.at(7.0) == 1e-3


def test_written_down_and_read_back():
    path = seht.WeightPath((0.1, 0.9), (1e-3, 2e-3))
    assert seht.WeightPath.of(json.loads(json.dumps(path.state()))) == path


@pytest.mark.parametrize(
    "state, said",
    [
        ({"format": "other", "positions": [0], "weights": [1]}, "no path of weights"),
        ([1e-3], "no path of weights"),
        ({"format": "seht.WeightPath/1", "positions": [0.0]}, "not complete"),
        ({"format": "seht.WeightPath/1", "positions": [0.2, 0.1], "weights": [1, 1]}, "grow"),
        ({"format": "seht.WeightPath/1", "positions": [10, 90], "weights": [1, 1]}, "from 0 to 1"),
        ({"format": "seht.WeightPath/1", "positions": [0.1], "weights": [0.0]}, "positive"),
        ({"format": "seht.WeightPath/1", "positions": [0.1], "weights": [1, 2]}, "as many"),
    ],
)
def test_other_formats_are_refused(state, said):
    with pytest.raises(ValueError, match=said):
        seht.WeightPath.of(state)


def test_a_training_goes_the_path_again():
    model = nn.Linear(3, 2)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    path = seht.WeightPath((0.0, 1.0), (1e-3, 1e-1))
    penalty = seht.HessianTrace(model, weight=path, total_steps=10, every=2)
    for step in range(10):
        penalty(lambda: F.cross_entropy(model(x), y))
        expected = 2 * path.at(step / 10) if step % 2 == 0 else 0.0
        assert penalty.last.weight == pytest.approx(expected)  # `every` multiplies it again
    assert penalty.path == path


def tuned_run(every, steps, total_steps):
    """A tuned weight that moves from the first look on, and the weights of its penalised steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y, others = torch.randn(8, 3), torch.randint(0, 2, (8,)), torch.randn(8, 3)
    free = seht.Tuning(gap=0.0, interval=1)
    penalty = seht.HessianTrace(model, weight=free, total_steps=total_steps, every=every, seed=0)
    held_out = lambda: F.cross_entropy(model(others), y)
    applied = {}
    for step in range(steps):
        penalty(lambda: F.cross_entropy(model(x), y), held_out=held_out)
        if penalty.last.weight > 0:
            applied[step] = penalty.last.weight
    return penalty, applied


def test_a_path_holds_the_weight_before_every_multiplies_it():
    penalty, applied = tuned_run(every=2, steps=40, total_steps=40)
    path = penalty.path
    assert len(set(path.weights)) > 2 and sorted(applied) == list(range(16, 40, 2))
    for step, weight in applied.items():  # each follows from the look before it
        assert weight == pytest.approx(2 * path.at((step - 2) / 40))


def test_a_training_that_goes_on_with_fewer_steps_still_has_a_path():
    penalty, _ = tuned_run(every=1, steps=40, total_steps=40)
    state = penalty.state_dict()
    shorter = seht.HessianTrace(
        nn.Linear(3, 2), weight=seht.Tuning(gap=0.0, interval=1), total_steps=20, seed=0
    )
    shorter.load_state_dict(state)
    assert shorter.path.positions[-1] < 1


def test_the_path_of_a_long_training_is_thinned_out(monkeypatch):
    (whole, _), most = tuned_run(every=1, steps=60, total_steps=60), 20
    monkeypatch.setattr("seht.strength.tuned_weight._POINTS", most)
    few, _ = tuned_run(every=1, steps=60, total_steps=60)
    a, b = whole.path, few.path
    assert len(a.weights) == 53 and most / 2 <= len(b.weights) <= most
    assert set(zip(b.positions, b.weights, strict=True)) < set(
        zip(a.positions, a.weights, strict=True)
    )
    assert (b.positions[0], b.positions[-1]) == (a.positions[0], a.positions[-1])


def test_a_path_needs_the_length_of_the_training():
    model = nn.Linear(3, 2)
    penalty = seht.HessianTrace(model, weight=seht.WeightPath((0.0,), (1e-3,)))
    with pytest.raises(ValueError, match="total_steps="):
        penalty(lambda: model(torch.randn(4, 3)).square().mean())


def test_what_its_state_wrote_down_is_a_weight_too():
    path = seht.WeightPath((0.0,), (1e-3,))
    penalty = seht.HessianTrace(nn.Linear(3, 2), weight=path.state(), total_steps=4)
    assert penalty.path == path


def test_a_path_is_gone_again_on_the_trace_that_found_it():
    """A weight of the Gauss-Newton trace means something else for the whole one."""
    path = seht.WeightPath((0.0,), (1e-3,))
    made = lambda **given: seht.HessianTrace(nn.Linear(3, 2), total_steps=4, **given)
    found = made(weight=path, curvature="ggn").path
    told = json.loads(json.dumps(found.state()))
    assert made(weight=found).curvature == made(weight=told).curvature == "ggn"
    assert made(weight=found, curvature="hessian").curvature == "hessian"
    assert made(weight=path).curvature == "hessian"  # written by hand: as beside any weight


def test_beyond_its_end_the_weight_stays_with_one_warning():
    model = nn.Linear(3, 2)
    path = seht.WeightPath((0.0, 0.5), (1e-3, 1e-2))
    penalty = seht.HessianTrace(model, weight=path, total_steps=3)
    closure = lambda: model(torch.ones(4, 3)).square().mean()
    for _ in range(3):
        penalty(closure)
    with pytest.warns(seht.PenaltyWarning, match="beyond total_steps=3") as found:
        for _ in range(3):
            penalty(closure)
    assert len(found) == 1 and penalty.last.weight == pytest.approx(1e-2)
    heir = seht.HessianTrace(model, weight=path, total_steps=3)
    heir.load_state_dict(penalty.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heir(closure)


def test_a_path_that_is_not_there_yet_is_no_other_weight():
    """``weight=None`` is a share of 2, so ``weight=penalty.path`` would silently be that."""
    model = nn.Linear(3, 2)
    x, y, held_out = torch.randn(8, 3), torch.randint(0, 2, (8,)), torch.randn(8, 3)
    tuned = seht.HessianTrace(model, weight="tuned", total_steps=9, seed=0)
    for _ in range(7):
        tuned(
            lambda: F.cross_entropy(model(x), y),
            held_out=lambda: F.cross_entropy(model(held_out), y),
        )
    with pytest.warns(seht.PenaltyWarning, match=r"penalty\.path is None.*a share of 2"):
        assert tuned.path is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seht.HessianTrace(model, weight=1e-3).path is None
