"""A closure that cannot be repeated is an error that says why; one that can is none."""

import random

import constants
import numpy as np
import pytest
import repeatable
import torch
import torch.nn.functional as F
import unrepeatable
from helpers import Snapshot
from stepping import FORMS, WEIGHT, assert_gradients, gradients, mlp, penalise, rows, warm_up

import seht
from seht.engines.forward_only import replicates

FINE = {**repeatable.BUILDERS, **constants.BUILDERS}


def build(builder):
    random.seed(1)
    np.random.seed(1)
    model = mlp(norm=False)
    return model, builder(model, *rows(32))


def host_random():
    """The state of Python's and NumPy's global random numbers."""
    name, key, *rest = np.random.get_state()
    return random.getstate(), name, key.tolist(), rest


# --- on the first steps -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", unrepeatable.BUILDERS)
def test_what_cannot_be_repeated(name, form):
    builder, words = unrepeatable.BUILDERS[name]
    model, closure = build(builder)
    before = Snapshot(model)
    with pytest.raises(seht.UnrepeatableError, match=words) as caught:
        penalise(model, closure, form)
    assert "return new states as aux" in str(caught.value)  # the way out
    Snapshot(model).assert_same(before, random=False)


@pytest.mark.parametrize("curvature", ["ggn"])
@pytest.mark.parametrize("name", list(unrepeatable.BUILDERS)[::4])
def test_the_same_with_the_gauss_newton_trace(name, curvature):
    model, closure = build(unrepeatable.BUILDERS[name][0])
    with pytest.raises(seht.UnrepeatableError):
        penalise(model, closure, "scalar", curvature=curvature)


@pytest.mark.parametrize("warm", [False, True], ids=["watched", "unwatched"])
@pytest.mark.parametrize("name", FINE)
def test_what_can_be_repeated_is_right(name, warm):
    model, closure = build(FINE[name])
    expected = penalise(model, closure, "autograd")
    wanted, after, host = gradients(model.parameters()), Snapshot(model), host_random()
    for form in FORMS:
        model, closure = build(FINE[name])
        got = penalise(model, closure, form, warm=warm)
        assert got.last.trace == pytest.approx(expected.last.trace, rel=1e-5, abs=1e-8)
        assert_gradients(gradients(model.parameters()), wanted)
        assert torch.equal(torch.get_rng_state(), after.random)
        assert host_random() == host
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, after.state[key], rtol=1e-9, atol=1e-12)


NUMBERS = ["layer_drop", "shuffled_in_python", "numpy_normal_numbers_one_by_one"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("options", [{"curvature": "ggn"}, {"on": True}], ids=str)
def test_global_random_numbers_end_where_one_plain_run_leaves_them(name, options):
    _, closure = build(FINE[name])
    closure()
    expected = host_random()
    model, closure = build(FINE[name])
    if options.pop("on", False):
        options["on"] = closure  # which is measured beside the loss, and leaves no trace
    penalise(model, closure, "scalar", **options)
    assert host_random() == expected


@pytest.mark.parametrize("name", NUMBERS)
def test_measuring_repeats_global_random_numbers(name):
    def traces():
        model, closure = build(FINE[name])
        return replicates(model, closure, probes=2, estimator=seht.SehtH()).traces

    _, closure = build(FINE[name])
    closure()
    expected, found = host_random(), traces()
    assert host_random() == expected
    assert found == pytest.approx(traces(), rel=1e-12)
    assert max(map(abs, found)) < 1e3  # other layers in one of the passes: 1e5 and more


def layer_drop_traces(form):
    """Of several steps, each of which leaves out other layers."""
    model, closure = build(FINE["layer_drop"])
    if form == "autograd":  # with a hook the reference runs its closure twice
        model[4].register_full_backward_hook(lambda *_: None)
    engine = "autograd" if form == "autograd" else "difference"
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=5, engine=engine)
    found = []
    for _ in range(12):
        penalty.backward(closure) if form == "lean" else penalty(closure)
        found.append(penalty.last.trace)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_layer_drop_step_after_step(form):
    expected = layer_drop_traces("autograd")
    assert len({round(value, 6) for value in expected}) > 3
    assert layer_drop_traces(form) == pytest.approx(expected, rel=1e-4)


# --- later ----------------------------------------------------------------------------------------

LATER = [
    "train_and_eval_in_turn", "another_seed", "a_generator_with_another_seed",
]  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_the_cheap_guards_catch_other_random_numbers_on_every_step(name):
    model, closure = build(unrepeatable.BUILDERS[name][0])
    with pytest.raises(seht.UnrepeatableError):
        penalise(model, closure, "scalar", warm=True)


DECISIONS = {
    "more": lambda h, k: h if k == 0 else h.relu(),
    "fewer": lambda h, k: h.relu() if k == 0 else h,
    "others": lambda h, k: h.relu() if k == 0 else F.leaky_relu(h),
}


@pytest.mark.parametrize("kind", DECISIONS)
def test_the_cheap_guards_catch_other_decisions_on_every_step(kind):
    model, (x, y), runs = mlp(norm=False), rows(), []

    def closure():
        runs.append(1)
        h = DECISIONS[kind](model[0](x), len(runs) - 1)
        return F.cross_entropy(model[4](h), y)

    with pytest.raises(seht.UnrepeatableError):
        penalise(model, closure, "scalar", warm=True)


def test_the_full_look_comes_back_now_and_then():
    model, (x, y) = mlp(norm=False), rows()
    factors = [1.0]
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    closure = lambda: F.cross_entropy(model(x) * factors[-1], y)
    for _ in range(4):
        penalty(closure)
    drifting = lambda: (factors.append(factors[-1] + 0.01), closure())[1]
    with pytest.raises(seht.UnrepeatableError, match="mul was given another argument"):
        for _ in range(600):
            penalty(drifting)


# --- the runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.parametrize(
    ("curvature", "form", "runs"),
    [
        ("hessian", "scalar", lambda k: 1 + 2 * k),
        ("hessian", "lean", lambda k: 1 + 2 * k),
        ("ggn", "scalar", lambda k: 1 + k),
        ("ggn", "lean", lambda k: 2 + k),
    ],
)
def test_how_often_a_closure_runs_and_what_replaying_says(curvature, form, runs, probes):
    model, (x, y), seen = mlp(), rows(), []

    def closure():
        seen.append(seht.replaying())
        return F.cross_entropy(model(x), y)

    assert not seht.replaying()
    penalise(model, closure, form, warm=True, curvature=curvature, probes=probes)
    assert seen == [False] + [True] * (runs(probes) - 1)
    assert not seht.replaying()


def test_a_plain_step_runs_it_once():
    model, seen = mlp(), []
    penalty = seht.HessianTrace(model, weight=0.0)
    x, y = rows()
    penalty(lambda: (seen.append(seht.replaying()), F.cross_entropy(model(x), y))[1])
    assert seen == [False]


def test_what_is_left_out_must_be_told_from_what_is_done_again():
    model, (x, y) = mlp(norm=False), rows()

    def closure():
        h = model[0](x)
        if not seht.replaying():
            str(h.detach().mean())
        return F.cross_entropy(model[4](h * h.square().detach()), y)

    penalty = seht.HessianTrace(model, weight=WEIGHT)
    warm_up(penalty)
    with pytest.raises(seht.UnrepeatableError, match="left out one detach and not another"):
        penalty(closure)


def test_the_parts_of_a_replayed_metric_are_the_centres():
    """Accuracy and loss in the log do not wander with the perturbed passes."""
    model, (x, y), seen = mlp(norm=False), rows(), []

    def closure():
        z = model(x)
        value = F.cross_entropy(z, y)
        seen.append((value.item(), (z.argmax(1) == y).double().mean().item()))
        return value

    penalise(model, closure, "scalar")
    assert len(seen) > 2 and len(set(seen)) == 1
