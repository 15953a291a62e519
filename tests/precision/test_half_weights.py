"""Weights in half precision: the passes of a penalised step run on float32 copies."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot
from lowprecision import HALVES, closure_of, images, net, step
from stepping import FORMS, WEIGHT, assert_gradients, gradients
from torch import nn

import seht
from seht.engines import ENGINES


def half_step(dtype, form, wide=False, **options):
    """One step of a network in half precision, or of the same numbers in float32."""
    model, x = net().to(dtype), images(dtype)[0]
    model, x = (model.float(), x.float()) if wide else (model, x)
    penalty = step(model, closure_of(model, x=x), form, **options)
    return penalty.last, gradients(model.parameters()), model


@pytest.mark.supports("weights in bfloat16 or float16")
@pytest.mark.parametrize(
    ("engine", "dtype", "curvature", "form"),
    [
        ("difference", torch.bfloat16, "hessian", "scalar"),
        ("difference", torch.float16, "ggn", "scalar"),
        ("difference", torch.bfloat16, "ggn", "lean"),
        ("difference", torch.float16, "hessian", "lean"),
        ("autograd", torch.bfloat16, "hessian", "scalar"),
        ("autograd", torch.float16, "ggn", "lean"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(ENGINES, HALVES, ["hessian", "ggn"], FORMS)
        ),
    ],
)
def test_weights_in_half_precision_have_float32_copies(engine, dtype, curvature, form):
    options = {"engine": engine, "curvature": curvature}
    expected, wanted, wide = half_step(dtype, form, wide=True, **options)
    last, got, model = half_step(dtype, form, **options)
    assert (last.loss, last.trace) == (expected.loss, expected.trace)
    assert all(g.dtype == dtype for g in got)
    assert_gradients([g.float() for g in got], wanted, rtol=max(4e-3, torch.finfo(dtype).eps))
    for a, b in zip(model.buffers(), wide.buffers(), strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert all(p.dtype == dtype for p in model.parameters())


def test_a_failure_leaves_the_half_precision_weights():
    model = net().bfloat16()
    parameters, calls = list(model.parameters()), []
    before = Snapshot(model)

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError
        return closure_of(model)()

    with pytest.raises(ArithmeticError):
        seht.HessianTrace(model, weight=WEIGHT)(closure)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    before.assert_same(Snapshot(model))


def test_half_precision_weights_reached_past_their_module():
    model = net().bfloat16()
    weight, (x, y) = model[9].weight, images(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'9\.weight'.*past its module"):
        seht.HessianTrace(model, weight=WEIGHT)(
            lambda: F.cross_entropy(F.linear(model[:9](x), weight), y)
        )


def test_aux_of_half_precision_weights():
    model, (x, y) = net().bfloat16(), images(torch.bfloat16)
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    loss, aux = penalty(lambda: (lambda z: (F.cross_entropy(z, y), {"logits": z}))(model(x)))
    assert aux["logits"].detach().shape == (16, 5)
    with pytest.raises(RuntimeError, match="add the term to the closure's loss"):
        (loss + aux["logits"].sum()).backward()


def test_recurrent_weights_in_half_precision():
    """They keep a list of their own weights."""
    found = []
    for wide in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": nn.LSTM(3, 4), "head": nn.Linear(4, 2)}).bfloat16()
        x = torch.randn(5, 6, 3).bfloat16()
        if wide:
            model, x = model.float(), x.float()
        y = torch.arange(6) % 2
        closure = lambda: F.cross_entropy(model["head"](model["body"](x)[0][-1]), y)
        step(model, closure, "scalar")
        found.append(gradients(model.parameters()))
    assert_gradients([g.float() for g in found[1]], found[0], rtol=0.01)


def test_casts_by_hand_are_left_out_with_half_precision_weights():
    found = []
    for wide in (True, False):
        model = net().bfloat16()
        x, y = images(torch.bfloat16)
        if wide:
            model, x = model.float(), x.float()
            closure = lambda: F.cross_entropy(model(x) + 1, y)
        else:
            ones = lambda: torch.ones(5, dtype=torch.bfloat16)
            closure = lambda: F.cross_entropy(
                model(x.float().to(torch.bfloat16)).to(dtype=torch.bfloat16).bfloat16() + ones(), y
            )
        found.append(step(model, closure, "scalar").last.trace)
    assert found[0] == found[1]
