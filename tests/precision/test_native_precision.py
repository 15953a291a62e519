"""``precision="native"``: all passes in the user's own precision.

Truth is nested autograd in float64.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lowprecision import (
    Types,
    autocast,
    closure_of,
    every_curvature,
    every_half,
    images,
    net,
    one,
    step,
)
from stepping import FORMS, WEIGHT, assert_gradients, gradients

import seht

# The relative error of the gradient that must hold, by type and curvature: what the trials of
# this network gave at most, rounded up.
NATIVE = {
    (torch.float16, "hessian"): 0.2,
    (torch.float16, "ggn"): 0.15,
    (torch.bfloat16, "hessian"): 0.7,
    (torch.bfloat16, "ggn"): 0.5,
}


def flat(trace, model):
    parts = torch.autograd.grad(trace, list(model.parameters()), allow_unused=True)
    zeros = (torch.zeros_like(p) for p in model.parameters())
    pairs = zip(parts, zeros, strict=True)
    return torch.cat([(z if g is None else g).flatten().double() for g, z in pairs])


@pytest.mark.supports('`precision="native"`', engine="difference")
@every_half
@every_curvature
@pytest.mark.parametrize("where", ["outer", pytest.param("inner", marks=pytest.mark.slow)])
def test_native_precision_has_a_step_of_its_own(dtype, curvature, where):
    model = net()
    exact = copy.deepcopy(model).double()
    options = {"curvature": curvature, "seed": 1}
    truth = flat(seht.hessian_trace(exact, closure_of(exact), engine="autograd", **options), exact)
    closure = closure_of(model, where, dtype)
    with Types() as types, autocast(where, "outer", dtype):
        ours = seht.hessian_trace(model, closure, precision="native", **options)
    assert types.seen == {dtype}
    found = flat(ours, model)
    assert (found - truth).norm() / truth.norm() < NATIVE[dtype, curvature]
    assert torch.cosine_similarity(found, truth, 0) > (0.98 if dtype == torch.float16 else 0.8)
    # ... which is what it is worth: at the step of float32 there is nothing but noise
    with autocast(where, "outer", dtype):
        small = seht.hessian_trace(model, closure, precision="native", kappa=1e-3, **options)
    assert (flat(small, model) - truth).norm() > 3 * (found - truth).norm()


@every_half
@every_curvature
def test_the_forms_agree_in_native_precision(dtype, curvature):
    found = [
        one(w, form, dtype=dtype, precision="native", curvature=curvature)
        for form in FORMS
        for w in ("outer",)
    ]
    (last, got, _), (expected, wanted, _) = found
    assert last.trace == expected.trace and last.error == expected.error
    assert_gradients(got, wanted, rtol=1e-5)


@every_half
def test_the_stated_error_tells_what_native_precision_costs(dtype):
    last = one("outer", dtype=dtype, precision="native")[0]
    assert last.error > 10 * one()[0].error
    assert last.error < NATIVE[dtype, "hessian"]


def test_autocasts_own_copies_of_the_weights_are_dropped():
    """It keeps them while it is on, and would show the centre's weights to every pass."""
    model = net()
    closure = closure_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(images()[0]), images()[1])  # fills them
        before = model(images()[0])
        penalty = seht.HessianTrace(model.eval(), weight=WEIGHT, precision="native")
        before = model(images()[0])
        penalty(closure)
        assert torch.equal(model(images()[0]), before)  # not those of a perturbed pass
    assert abs(penalty.last.trace) > 0.1


def test_the_step_starts_again_when_the_precision_changes():
    model = net()
    penalty = seht.HessianTrace(model, weight=WEIGHT, precision="native")
    closure = closure_of(model)
    kappas = []
    for dtype in (None, torch.float16, None):
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            penalty(closure)
        kappas.append(penalty.state_dict()["engine"]["kappa"])
    assert kappas[1] > 3 * max(kappas[0], kappas[2])
    other = seht.HessianTrace(model, weight=WEIGHT, precision="native")
    other.load_state_dict(penalty.state_dict())
    assert other.state_dict() == penalty.state_dict()


def test_a_loss_in_half_precision():
    """``(1 - 2 weight / e^2)`` times a gradient has no room for 8 bits."""
    model = net()
    x = images()[0]
    with torch.autocast("cpu", torch.bfloat16):
        closure = lambda: model(x).square().mean()
        assert closure().dtype == torch.bfloat16
    found = []
    for form in FORMS:
        model = net()
        penalty = step(model, lambda: model(x).square().mean(), form, "outer", precision="native")
        assert penalty.last.error < 1
        found.append(gradients(model.parameters()))
    assert_gradients(found[0], found[1], rtol=2e-3)
