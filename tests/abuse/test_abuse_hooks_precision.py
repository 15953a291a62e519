"""Hooks inside the network where the passes have a precision of their own, and those that are not
the user's: a framework's.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from abusing import every_way, gradients_of, penalty_of, run
from stepping import FORMS, assert_gradients, mlp, rows
from torch import nn

import seht
from seht.tensors import graph


def clip(module, into, out):
    return tuple(None if g is None else g.clamp(-1e-2, 1e-2) for g in into)


def entropy_of(model):
    x, y = rows()
    return lambda: F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)


@every_way
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_under_autocast_a_hook_sees_the_gradient_of_the_loss(engine, form, curvature, scale):
    """The loss's own, times what the user's scaler puts on it, and in float32."""
    seen, x = [], rows()[0].float()
    model, plain = mlp().float(), mlp().float()

    def look(module, into, out):
        seen.append(out[0].detach().clone())

    def make(m):
        return lambda: F.cross_entropy(m(x), rows()[1])

    plain[1].register_full_backward_hook(look)
    (make(plain)() * scale).backward()
    wanted = seen.pop()
    model[1].register_full_backward_hook(look)
    penalty = penalty_of(model, engine, curvature)
    with torch.autocast("cpu", torch.bfloat16):
        if form == "lean":
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            penalty.backward(make(model), scaler=scaler)
        else:
            loss = penalty(make(model)) * scale
    if form == "scalar":
        loss.backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted, rtol=1e-4, atol=1e-6 * scale)


@every_way
def test_weights_in_half_precision(engine, form, curvature):
    """The passes run on copies: hooks see their gradient, once; the penalty is what it is."""
    build = lambda: mlp().bfloat16()
    model, seen = build(), []

    def hook(module, into, out):
        seen.append(out[0].dtype)
        return clip(module, into, out)

    model[1].register_full_backward_hook(hook)
    got, penalty = gradients_of(model, entropy_of, engine, form, curvature)
    other = build()
    wanted, reference = gradients_of(other, entropy_of, engine, form, curvature)
    assert len(seen) == 1 and seen[0] == torch.float32
    assert penalty.last.trace == pytest.approx(reference.last.trace, rel=1e-3)
    assert [g.dtype for g in got] == [g.dtype for g in wanted]
    assert not torch.equal(got[0], wanted[0])  # clipped
    assert_gradients(got[4:], wanted[4:], rtol=2e-2)  # behind no hook


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_a_module_beside_the_model(form, curvature):
    """They are found when it is called: the lean form then starts again, with a graph."""
    x, y = rows()
    seen = []

    def make(model, beside):
        return lambda: F.cross_entropy(seht.boundary(model(beside(x))), y)

    torch.manual_seed(1)
    beside = nn.Linear(x.shape[1], x.shape[1]).double()
    plain, model = mlp(), mlp()
    handle = beside.register_full_backward_hook(lambda m, i, out: seen.append(out[0].clone()))
    make(plain, beside)().backward()
    wanted = seen.pop()
    run(penalty_of(model, "difference", curvature), make(model, beside), form)
    handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted, rtol=1e-9, atol=1e-12)


def _watch(counts, *_):
    counts.append(1)


def test_a_framework_s_hook_is_none_of_the_user_s(monkeypatch):
    """It is met in every pass, as FSDP's must be, and the lean form stays lean."""
    monkeypatch.setattr(_watch, "__module__", "lightning.fabric.wrappers")
    x, y = rows()
    model, fired = mlp(), []

    def closure():
        z = model(x)
        z.register_hook(partial(_watch, fired))
        return F.cross_entropy(z, y)

    penalty = penalty_of(model, "difference", "hessian")
    run(penalty, closure, "lean")
    assert len(fired) == 3 and not penalty._course.engine._whole


def test_whose_a_hook_is():
    x = torch.ones(2, requires_grad=True)
    assert not graph.heard_anyway((x, lambda g: g))
    assert not graph.heard_anyway((x, F.normalize))
    assert not graph.heard_anyway((x, torch.sign))
    assert not graph.heard_anyway((x,))
