"""SEHT-D pays only for what it draws: with the prefix kept, the step is the same."""

import pytest
import torch
from helpers import Snapshot
from prefixes import DROPPED, KEPT, Net, images, made
from stepping import FORMS, WEIGHT, Drawn, assert_gradients, gradients, penalise, warm_up
from torch.utils._python_dispatch import TorchDispatchMode

import seht
from seht.engines import difference
from seht.replay.passes import Passes


@pytest.fixture
def kept(monkeypatch):
    """Whether each estimate kept its prefix."""
    seen, start = [], Passes.__init__

    def init(self, *args, **kwargs):
        start(self, *args, **kwargs)
        seen.append(self.prefix is not None)

    monkeypatch.setattr(Passes, "__init__", init)
    return seen


def run(builder, form, monkeypatch, *, share, place=-1, **options):
    model, closure = builder()
    monkeypatch.setattr(difference, "_pays", lambda task: share)
    penalty = penalise(model, closure, form, warm=True, estimator=Drawn(place, probes=2), **options)
    return model, penalty, Snapshot(model)


def assert_same_step(builder, form, monkeypatch, **options):
    """Value, gradient, buffers and random state with the prefix kept, and in the full form."""
    full, plain, left = run(builder, form, monkeypatch, share=False, **options)
    model, penalty, after = run(builder, form, monkeypatch, share=True, **options)
    assert penalty.last.trace == pytest.approx(plain.last.trace, rel=1e-7)
    assert_gradients(gradients(model.parameters()), gradients(full.parameters()), rtol=1e-6)
    assert torch.equal(after.random, left.random)
    for name, value in left.state.items():
        torch.testing.assert_close(after.state[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KEPT)
def test_a_prefix_that_is_kept_changes_nothing(name, form, curvature, monkeypatch, kept):
    assert_same_step(KEPT[name], form, monkeypatch, curvature=curvature)
    assert kept == [False, True]


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DROPPED)
def test_a_prefix_that_cannot_be_kept_is_dropped(name, form, curvature, monkeypatch, kept):
    assert_same_step(DROPPED[name], form, monkeypatch, curvature=curvature)
    assert kept == [False, False]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", ["residual_connections_in_place", "no_grad_and_random_numbers"])
def test_from_any_layer_on(name, place, monkeypatch):
    for form in FORMS:
        assert_same_step(KEPT[name], form, monkeypatch, place=place)


def test_it_agrees_with_nested_autograd(monkeypatch):
    for name in ("custom_function_right_before_the_end", "residual_connections_in_place"):
        model, closure = KEPT[name]()
        expected = penalise(model, closure, "autograd", estimator=Drawn(-1, probes=2))
        wanted = gradients(model.parameters())
        model, got, _ = run(KEPT[name], "scalar", monkeypatch, share=True)
        assert got.last.trace == pytest.approx(expected.last.trace, rel=1e-6)
        assert_gradients(gradients(model.parameters()), wanted)


def test_metrics_in_the_prefix_that_are_left_out(monkeypatch):
    def builder():
        model, (x, y) = made(Net())[0], images()

        def closure():
            if not seht.replaying():
                str(model(x).argmax(1).double().mean())
            return torch.nn.functional.cross_entropy(model(x), y)

        return model, closure

    assert_same_step(builder, "scalar", monkeypatch)


# --- the work that is saved -----------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts convolutions and their gradients as they reach the kernels."""

    def __enter__(self):
        self.forward = self.backward = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func is torch.ops.aten.convolution.default
        self.backward += func is torch.ops.aten.convolution_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("place", "forward", "backward"),
    [
        (3, 2, 2),  # the head: everything before it once
        (2, 2, 2),
        (1, 2 + 2, 2 + 2),  # the second convolution: itself in each pass
        (0, 6, 6),  # the first one: nothing comes before it
    ],
)
def test_the_prefix_is_computed_and_differentiated_once(place, forward, backward, monkeypatch):
    monkeypatch.setattr(difference, "_pays", lambda task: True)
    model, closure = KEPT["plain"]()
    penalty = seht.HessianTrace(model, weight=WEIGHT, estimator=Drawn(place))
    warm_up(penalty)
    with Count() as count:
        penalty(closure).backward()
    assert (count.forward, count.backward) == (forward, backward)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_engine_keeps_it_by_itself(place, kept):
    model, closure = KEPT["plain"]()
    penalise(model, closure, "scalar", warm=True, estimator=Drawn(place))
    assert kept == [True]


def test_it_does_not_where_that_would_not_pay(kept):
    model, closure = KEPT["plain"]()
    for estimator in (Drawn(0), Drawn(0, 3), seht.SehtH()):
        penalise(model, closure, "scalar", warm=True, estimator=estimator)
    assert kept == [False] * 3


def test_another_sequence_in_the_prefix_is_noticed(monkeypatch):
    monkeypatch.setattr(difference, "_pays", lambda task: True)
    model, (x, y), runs = made(Net())[0], images(), []

    def closure():
        runs.append(1)
        a = x if len(runs) == 1 else x * 2
        return torch.nn.functional.cross_entropy(model(a), y)

    with pytest.raises(seht.UnrepeatableError, match="where it had called"):
        penalise(model, closure, "scalar", warm=True, estimator=Drawn(-1))


def test_a_run_that_ends_in_the_prefix_is_noticed(monkeypatch):
    monkeypatch.setattr(difference, "_pays", lambda task: True)
    model, (x, y), runs = made(Net())[0], images(), []

    def closure():
        runs.append(1)
        if len(runs) > 1:
            return model.conv1(x).mean()
        return model.conv1(x).mean() + torch.nn.functional.cross_entropy(model(x), y)

    with pytest.raises(seht.UnrepeatableError, match="ended earlier"):
        penalise(model, closure, "scalar", warm=True, estimator=Drawn(-1))
