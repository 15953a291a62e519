"""The operator zoo: second and third derivatives against differences, in float64.

Order 2 is compared with differences of plain first-order gradients of the unmodified model, which
are right for every operator. Order 3 is compared with differences of the estimate (any case), and
once more with second differences of plain gradients (smooth cases). Each comparison is made with
two step sizes: both must agree with the derivative, and so with each other.
"""

import copy

import cases
import pytest
import torch
import torch.nn.functional as F
from case_parts import tokens
from reference import (
    SEED,
    Fixture,
    curvature,
    curvature_gradient,
    dot,
    extrapolated,
    gradient,
    norm,
    relative,
    slope,
)
from torch import nn

import seht
from seht.operators import orders, safe_forms

# Steps so small that no kink is crossed, in float64 still far from rounding.
STEPS = (1e-6, 5e-7)


def estimate(fixture):
    return seht.hessian_trace(
        fixture.model, fixture.closure, estimator=fixture.estimator, engine="autograd", seed=SEED
    )


def order_2_error(fixture):
    t = estimate(fixture).item()
    return max(abs(curvature(fixture, step) - t) for step in STEPS) / abs(t)


def order_3_error(fixture):
    """Over directions in every parameter and every real input, relative to the gradient."""
    g = gradient(estimate(fixture), fixture.leaves)
    errors = [
        abs(slope(lambda: estimate(fixture), fixture.leaves, d, step) - dot(g, d).item())
        for d in fixture.directions(2)
        for step in STEPS
    ]
    return max(errors) / norm(g).item()


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_order_2(case):
    assert order_2_error(Fixture(case)) < 2e-6


@pytest.mark.parametrize("case", cases.CASES, ids=str)
@pytest.mark.supports("{case.operator}", section="{case.section}", engine="autograd")
def test_order_3(case):
    assert order_3_error(Fixture(case)) < 2e-9


@pytest.mark.parametrize("case", cases.smooth(), ids=str)
def test_order_3_from_first_order_gradients_alone(case):
    fixture = Fixture(case)
    ours = gradient(estimate(fixture), fixture.leaves)
    for step in (2e-4, 1e-4):
        truth = extrapolated(lambda h: curvature_gradient(fixture, h), step)
        assert relative(ours, truth) < 1e-6


@pytest.mark.parametrize("case", cases.smooth(), ids=str)
def test_the_model_is_left_as_it_was(case):
    fixture = Fixture(case)
    before = copy.deepcopy(fixture.model.state_dict())
    estimate(fixture)
    after = fixture.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.parametrize("id", ["LSTM-2", "GRU-2", "BatchNorm2d-train", "LayerNorm", "attention"])
def test_cuda_kernels(id):
    """cuDNN's recurrent layers and norms, flash attention: the same number as on the CPU."""
    fixture = Fixture(cases.find(id))
    parameters = list(fixture.model.parameters())
    t = estimate(fixture)
    g = gradient(t, parameters)
    model, (x, y), loss_fn = cases.find(id).build()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    on_gpu = seht.hessian_trace(
        model,
        lambda: loss_fn(model, (x, y)),
        estimator=fixture.estimator,
        engine="autograd",
        seed=SEED,
    )
    assert on_gpu.item() == pytest.approx(t.item(), rel=1e-8)
    assert relative([p.cpu() for p in gradient(on_gpu, list(model.parameters()))], g) < 1e-8


# --- these checks can fail: what the fused operators would have given -------------------------


def gradient_error(fixture):
    """The whole gradient against second differences of plain gradients."""
    truth = extrapolated(lambda h: curvature_gradient(fixture, h), 2e-4)
    return relative(gradient(estimate(fixture), fixture.leaves), truth)


def with_fused(monkeypatch, functions, error, fixture):
    """The engine's error without its replacements; skips where PyTorch itself has been mended."""
    for function in functions:
        monkeypatch.delitem(safe_forms.SAFE, function)
    monkeypatch.setattr(orders, "WRONG", {})  # else it would be refused
    try:
        wrong = error(fixture)
    except RuntimeError as refusal:
        pytest.skip(f"this PyTorch refuses: {refusal}")
    if wrong < 1e-6:
        pytest.skip("this PyTorch has it right")
    return wrong


NORMS = [F.batch_norm, F.instance_norm, F.layer_norm]
NORMS += [torch.batch_norm, torch.instance_norm, torch.layer_norm]

# How wrong the gradient is at least with the fused operators of torch 2.13.0, as a share of it.
FUSED_ERROR = {
    "BatchNorm1d-train": 0.2,
    "BatchNorm2d-train": 0.05,
    "BatchNorm2d-train-nostats": 0.05,
    "InstanceNorm2d": 0.1,
    "LayerNorm": 0.4,
    "LayerNorm-3d": 0.1,
    "resnet18-silu": 0.3,
    "gpt": 1.2,
}


@pytest.mark.parametrize("id", FUSED_ERROR)
def test_fused_norms_are_right_at_order_2_and_wrong_at_order_3(monkeypatch, id):
    fixture = Fixture(cases.find(id))
    assert gradient_error(fixture) < 1e-6
    wrong = with_fused(monkeypatch, NORMS, gradient_error, fixture)
    assert order_2_error(fixture) < 2e-6
    assert wrong > FUSED_ERROR[id]


@pytest.mark.parametrize("name", ["parametrization", "hook"])
def test_fused_weight_norm_is_wrong_at_order_2(monkeypatch, name):
    fixture = Fixture(cases.find(f"weight_norm-{name}"))
    assert order_2_error(fixture) < 2e-6
    wrong = with_fused(monkeypatch, [torch._weight_norm], order_2_error, fixture)
    assert wrong > 0.01


def test_attention_needs_the_math_kernel():
    fixture = Fixture(cases.find("attention-causal"))
    assert estimate(fixture).requires_grad
    loss = fixture.closure()
    weight = fixture.model[0].qkv.weight
    (g,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(g.sum(), weight)


# --- what has no second derivative says so ----------------------------------------------------


def test_operators_without_second_derivative():
    model, batch, loss_fn = tokens(nn.EmbeddingBag(7, 4, mode="mean"))()
    with pytest.raises(RuntimeError, match=r"no second derivative.*engine='difference'"):
        seht.hessian_trace(model, lambda: loss_fn(model, batch), engine="autograd")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is on its way out
def test_compiled_and_scripted_modules_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(3, 2)
    inner = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    for wrapped in (torch.compile(model), inner):
        with pytest.raises(RuntimeError, match=r"compiled.*engine='difference'"):
            seht.hessian_trace(wrapped, lambda: wrapped(x).sum(), engine="autograd")
    model.compile()
    with pytest.raises(RuntimeError, match="the model is compiled"):
        seht.hessian_trace(model, lambda: model(x).sum(), engine="autograd")
    traced = torch.jit.trace(nn.Linear(2, 2), x)
    with pytest.raises(RuntimeError, match="scripted"):
        seht.hessian_trace(traced, lambda: traced(x).sum(), engine="autograd")
