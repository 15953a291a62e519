"""Penalised steps run in float32 by default, whatever autocast is around or inside them.

Truth is the same step without any of it.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import every_engine
from lowprecision import (
    Types,
    autocast,
    closure_of,
    every_curvature,
    every_form,
    images,
    net,
    one,
    step,
)
from stepping import WEIGHT, assert_gradients, gradients
from torch import nn

import seht


@pytest.mark.supports("autocast")
@every_engine
@every_curvature
@every_form
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_autocast_is_off_in_penalised_steps(engine, curvature, form, where):
    options = {"engine": engine, "curvature": curvature}
    expected, wanted, model = one(form=form, **options)
    last, got, other = one(where, form, **options)
    assert (last.loss, last.trace, last.error) == (expected.loss, expected.trace, expected.error)
    # The scalar form sums in another order under autocast.
    assert_gradients(got, wanted, rtol=0 if form == "lean" else 3e-3)
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


@every_curvature
def test_a_backward_under_autocast(curvature):
    """PyTorch would round the centre's gradient, and the penalty's weighs it in the thousands."""
    _, wanted, _ = one("outer", curvature=curvature)
    _, got, _ = one("outer", inside=True, curvature=curvature)
    assert_gradients(got, wanted, rtol=0)


def test_the_nested_engine_is_off_by_rounding_under_an_autocast_backward():
    _, wanted, _ = one("outer", engine="autograd")
    _, got, _ = one("outer", inside=True, engine="autograd")
    assert_gradients(got, wanted, rtol=0.02)


@every_engine
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_plain_steps_keep_the_users_autocast(engine, where):
    model = net()
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, warmup=1)
    closure = closure_of(model, where)
    for expected in (torch.bfloat16, torch.float32, torch.float32):
        with Types() as types, autocast(where, "outer"):
            penalty(closure)
            assert torch.is_autocast_enabled("cpu") == (where == "outer")
        assert types.seen == {expected}
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast.__enter__.__module__ == "torch.amp.autocast_mode"


def test_what_the_closure_asks_about_autocast():
    """Models cast by hand where they find it on."""
    model, seen = net(), set()
    x, y = images()

    def closure():
        with torch.autocast("cpu", torch.bfloat16):
            seen.add(torch.is_autocast_enabled("cpu"))
            with torch.autocast("cpu", enabled=False):
                h = model[:7](x)
            seen.add(torch.is_autocast_enabled("cpu"))
            return F.cross_entropy(model[7:](h), y)

    seht.HessianTrace(model, weight=WEIGHT)(closure)
    assert seen == {False}


@every_engine
@every_form
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_operands_of_several_types(engine, form, where):
    """Inputs in half precision (Fabric makes them so) meet float32 weights: autocast would have
    brought them to one type. What is rounded before autocast is on is rounded in every pass.
    """
    x, y = images()
    found = []
    for cast in (False, True):
        model = net()

        def closure(model=model, cast=cast):
            h = x.bfloat16() if where == "inner" else x
            if not cast:
                return F.cross_entropy(model(h.float()), y)
            with autocast(where, "inner"):
                return F.cross_entropy(model(h.bfloat16()), y)

        penalty = step(model, closure, form, where if cast else None, engine=engine)
        found.append((gradients(model.parameters()), penalty.last.trace))
    assert_gradients(found[1][0], found[0][0], rtol=0 if form == "lean" else 3e-3)
    assert found[1][1] == found[0][1]


def test_the_trace_of_another_closure():
    model = net()
    loss = seht.HessianTrace(model, weight=WEIGHT, seed=1)
    value = loss(closure_of(model, "inner"), on=closure_of(model, "inner"))
    value.backward()
    expected = one()[0]
    assert loss.last.trace == expected.trace
    assert loss.last.loss != expected.loss  # that one is the user's own


def test_exact_trace_is_exact_under_autocast():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = seht.exact_trace(model, lambda: model(x).square().mean())
    with torch.autocast("cpu", torch.bfloat16):
        got = seht.exact_trace(model, lambda: model(x).square().mean())
    assert torch.equal(got, expected)


def test_an_unknown_precision():
    with pytest.raises(ValueError, match="did you mean 'native'"):
        seht.HessianTrace(net(), weight=1, precision="nativ")
