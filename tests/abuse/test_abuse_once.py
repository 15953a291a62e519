"""Functions with a first derivative only: an error wherever a second one would silently be 0."""

import pytest
import torch
import torch.nn.functional as F
from abusing import FORMS, Surroundings, every_way, penalty_of, run
from stepping import mlp, rows
from torch.autograd.function import once_differentiable

import seht


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def cube(x):
    return x**3


def under_a_sum(model, function):
    x, _ = rows()
    return lambda: function(model(x)).sum()


def inside(model, function):
    x, y = rows()
    return lambda: F.cross_entropy(model[4](function(model[0](x))), y)


@every_way
@pytest.mark.parametrize("make", [under_a_sum, inside])
def test_the_penalty(engine, form, curvature, make):
    model = mlp(norm=False)
    boundary = "4" if curvature == "ggn" and make is inside else None
    penalty = penalty_of(model, engine, curvature, boundary=boundary)
    if engine == "difference" and (curvature == "hessian" or make is inside):
        run(penalty, make(model, Cube.apply), form)  # first derivatives are enough
        other = penalty_of(model, engine, curvature, boundary=boundary)
        run(other, make(model, cube), form)
        assert penalty.last.trace == pytest.approx(other.last.trace, rel=1e-9)
        return
    before = Surroundings(model, penalty)
    with pytest.raises(RuntimeError, match=r"Cube has no double backward.*(use engine=|take curv)"):
        run(penalty, make(model, Cube.apply), form)
    Surroundings(model, penalty).assert_same(before)


@pytest.mark.parametrize("make", [under_a_sum, inside])
def test_the_exact_trace(make):
    model = mlp(norm=False)
    with pytest.raises(RuntimeError, match=r"Cube has no double backward.*hessian_trace"):
        seht.exact_trace(model, make(model, Cube.apply))


@pytest.mark.parametrize("form", FORMS)
def test_one_that_does_not_lie_between_loss_and_weights(form):
    model, (x, y) = mlp(norm=False), rows()
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    penalty = penalty_of(model, "autograd", "hessian")
    run(penalty, lambda: F.cross_entropy(model(x) * Cube.apply(scale), y), form)
    assert penalty.last.trace == pytest.approx(
        seht.hessian_trace(
            model, lambda: F.cross_entropy(model(x), y), engine="autograd", seed=penalty.last.seed
        ).item()
    )
