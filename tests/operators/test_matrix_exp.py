"""Gradients of order 1 / e^2 through the matrix exponential: its backward minds their size."""

import pytest
import torch
from reference import relative
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import seht


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)).double()
    x, t = torch.randn(8, 6).double(), torch.randn(8, 3).double()
    with torch.no_grad():
        model[0].parametrizations.weight.original.add_(torch.randn(6, 6))
    return model, x, t


def plain(model, x, t):
    return (model(x) - t).square().mean()


def penalised(model, x, t):
    """The gradient's gradient goes through the exponential, too."""
    x = x.clone().requires_grad_()
    z = model(x)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return (z - t).square().mean() + slope.square().mean()


def found(engine, form, curvature, loss):
    model, x, t = problem()
    penalty = seht.HessianTrace(model, weight=1.0, engine=engine, curvature=curvature, seed=1)
    closure = lambda: loss(model, x, t)
    penalty(closure).backward() if form == "scalar" else penalty.backward(closure)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("loss", [plain, penalised])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_an_orthogonal_weight(form, curvature, loss):
    ours, right = (found(engine, form, curvature, loss) for engine in ("difference", "autograd"))
    for a, b in zip(ours, right, strict=True):
        assert relative([a], [b]) < 1e-5


@pytest.mark.parametrize("function", [torch.matrix_exp, torch.linalg.matrix_exp])
def test_a_batch_of_matrices_and_one_without_gradient(function):
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(3, 4, 4, generator=generator, dtype=torch.float64))
    model = nn.ParameterList([weight])
    closure = lambda: function(weight)[:2].square().mean()  # the third matrix has no gradient
    traces = {}
    for engine in ("difference", "autograd"):
        trace = seht.hessian_trace(model, closure, engine=engine, seed=1)
        traces[engine] = (trace.detach(), *torch.autograd.grad(trace, weight))
    assert relative(traces["difference"][:1], traces["autograd"][:1]) < 1e-5
    assert relative(traces["difference"][1:], traces["autograd"][1:]) < 1e-5
