"""Hooks: those on parameters see the whole gradient, once; those inside the network see the loss's
own, once, and neither change nor spoil the penalty.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from abusing import Surroundings, every_way, gradients_of, penalty_of, run
from stepping import FORMS, assert_gradients, mlp, rows
from torch import nn

import seht


def cross_entropy(model):
    x, y = rows()
    return lambda: F.cross_entropy(model(x), y)


def penalty_alone(engine, form, curvature, make=cross_entropy):
    """What the penalty adds to the plain gradient, without any hook."""
    model, plain = mlp(), mlp()
    total, _ = gradients_of(model, make, engine, form, curvature)
    make(plain)().backward()
    return [g - p.grad for g, p in zip(total, plain.parameters(), strict=True)]


def register_on_a_tensor(model, hook):
    x, y = rows()

    def closure():
        h = model[0](x)
        h.register_hook(lambda g: hook(None, (g,), None)[0])
        return F.cross_entropy(seht.boundary(model[4](model[3](model[2](model[1](h))))), y)

    return closure


def register_on_a_module(model, hook):
    model[1].register_full_backward_hook(hook)
    return cross_entropy(model)


def register_everywhere(model, hook):
    own = model[1]
    nn.modules.module.register_module_full_backward_hook(
        lambda module, into, out: hook(module, into, out) if module is own else None
    )
    return cross_entropy(model)


@pytest.fixture(autouse=True)
def _no_hooks_left():
    yield
    nn.modules.module._global_backward_hooks.clear()
    nn.modules.module._global_is_full_backward_hook = None


@pytest.mark.supports("backward hooks inside the network")
@every_way
@pytest.mark.parametrize(
    "register", [register_on_a_tensor, register_on_a_module, register_everywhere]
)
@pytest.mark.parametrize("warm", [True, False])
def test_a_hook_that_clips_the_gradient(engine, form, curvature, register, warm):
    """It clips the gradient of the loss, as in a plain step; the penalty is what it is."""
    seen = []

    def clip(module, into, out):
        seen.append(into[0].detach().clone())
        return tuple(None if g is None else g.clamp(-1e-2, 1e-2) for g in into)

    plain = mlp()
    register(plain, clip)().backward()
    (expected,) = seen
    nn.modules.module._global_backward_hooks.clear()
    seen.clear()
    make = lambda model: register(model, clip)
    got, _ = gradients_of(mlp(), make, engine, form, curvature, warm=warm)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected, rtol=1e-9, atol=1e-12)
    added = penalty_alone(engine, form, curvature)
    wanted = [p.grad + g for p, g in zip(plain.parameters(), added, strict=True)]
    assert_gradients(got, wanted, rtol=1e-5)


@every_way
def test_gradients_that_are_retained(engine, form, curvature):
    x, y = rows()
    kept = []

    def make(model):
        def closure():
            h = model[0](x)
            h.retain_grad()
            kept.append(h)
            return F.cross_entropy(seht.boundary(model[4](model[2](model[1](h)))), y)

        return closure

    plain = mlp()
    make(plain)().backward()
    expected = kept.pop().grad
    gradients_of(mlp(), make, engine, form, curvature)
    found = [h.grad for h in kept if h.retains_grad and h.grad is not None]
    assert len(found) == 1
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.supports("hooks on parameters")
@every_way
def test_hooks_of_parameters(engine, form, curvature):
    """A mask on the gradient, and an optimiser inside the backward pass."""
    model, other = mlp(), mlp()
    mask = torch.arange(24.0).view(6, 4) % 2
    seen, after = [], []

    def keep_half(grad):
        seen.append(grad.clone())
        return grad * mask

    model[0].weight.register_hook(keep_half)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    got, penalty = gradients_of(model, cross_entropy, engine, form, curvature)
    wanted, plain = gradients_of(other, cross_entropy, engine, form, curvature)
    assert len(seen) == len(after) == 1 and penalty.last.trace == plain.last.trace
    torch.testing.assert_close(seen[0], wanted[0])
    torch.testing.assert_close(got[0], wanted[0] * mask)
    torch.testing.assert_close(after[0], got[4])


@pytest.mark.supports("forward hooks")
@every_way
def test_forward_hooks_run_in_every_pass(engine, form, curvature):
    model, calls = mlp(), Counter()

    def hook(module, inputs, output):
        calls["all"] += 1
        calls["first"] += not seht.replaying()

    model[0].register_forward_hook(hook)
    run(penalty_of(model, engine, curvature), cross_entropy(model), form)
    passes = {("hessian", "scalar"): 3, ("hessian", "lean"): 3, ("ggn", "scalar"): 2}
    assert calls["all"] == (1 if engine == "autograd" else passes.get((curvature, form), 3))
    assert calls["first"] == 1


@every_way
def test_a_forward_hook_that_changes_the_output(engine, form, curvature):
    model = mlp()
    model[2].register_forward_hook(lambda module, inputs, output: output * 0.5)
    penalty = penalty_of(model, engine, curvature)
    run(penalty, cross_entropy(model), form)
    x, y = rows()
    half = mlp()
    parts = lambda: seht.boundary(half[4](half[2](half[1](half[0](x))) * 0.5))
    trace = seht.hessian_trace(
        half, lambda: F.cross_entropy(parts(), y), engine="autograd", curvature=curvature,
        seed=penalty.last.seed,
    )  # fmt: skip
    assert penalty.last.trace == pytest.approx(trace.item(), rel=1e-4)


@every_way
def test_a_module_hook_that_fails(engine, form, curvature):
    model = mlp()

    def fail(module, into, out):
        raise ValueError("boom")

    model[1].register_full_backward_hook(fail)
    penalty = penalty_of(model, engine, curvature)
    before = Surroundings(model)
    with pytest.raises(ValueError, match="boom"):
        run(penalty, cross_entropy(model), form)
    assert model[0].weight.grad is None  # what lies behind the hook; the rest is as in any step
    model.zero_grad()
    Surroundings(model).assert_same(before, random=False, buffers=False)


@pytest.mark.parametrize("form", FORMS)
def test_held_statistics_and_hooks_are_refused(form):
    model = mlp()
    model[1].register_full_backward_hook(lambda module, into, out: None)
    penalty = penalty_of(
        model, "difference", "hessian", estimator="seht-s", coupling="frozen"
    )  # fmt: skip
    before = Surroundings(model, penalty)
    with pytest.raises(ValueError, match=r"remove the hooks, or take coupling='own'"):
        run(penalty, cross_entropy(model), form)
    Surroundings(model, penalty).assert_same(before)
