"""Fused norms whose third derivative the difference engine would need itself: refused in words.

They lie behind the outputs, where the loss's own curvature is differentiated, or under gradients of
gradients that the closure takes. The reference replaces them and is right.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht


class Split(nn.Module):
    """A body, whose outputs count as the network's, and a head with a norm."""

    def __init__(self, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Sequential(norm, nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.body(x))


NORMS = {"layer": lambda: nn.LayerNorm(6), "batch": lambda: nn.BatchNorm1d(6)}


def problem(norm):
    torch.manual_seed(0)
    model = Split(NORMS[norm]()).double()
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    return model, lambda: F.cross_entropy(model(x), y)


def off(model, closure, **options):
    """The relative distance of the engines' gradients in the first weight."""
    weight = next(model.parameters())
    found, truth = (
        torch.autograd.grad(seht.hessian_trace(model, closure, engine=e, seed=1, **options), weight)
        for e in ("difference", "autograd")
    )
    return float((found[0] - truth[0]).norm() / truth[0].norm())


@pytest.mark.parametrize("norm", NORMS)
def test_behind_the_boundary(norm):
    model, closure = problem(norm)
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", boundary="body", seed=1)
    with pytest.raises(RuntimeError, match=r"between the network's outputs and the loss.*autograd"):
        penalty(closure)
    assert penalty.step == 0
    # The loss itself needs no such derivative, nor does the value alone.
    seht.HessianTrace(model, weight=0.1, seed=1)(closure).backward()
    with torch.no_grad():
        options = {"curvature": "ggn", "boundary": "body", "seed": 1}
        value = seht.hessian_trace(model, closure, **options)
        exact = seht.hessian_trace(model, closure, engine="autograd", **options)
    assert abs(value / exact - 1) < 1e-5


def test_a_norm_in_evaluation_mode_is_affine():
    model, closure = problem("batch")
    model.eval()
    assert off(model, closure, curvature="ggn", boundary="body") < 1e-5


def coordinates(order, norm):
    """A physics-informed loss with derivatives of this order, and its model."""
    torch.manual_seed(0)
    parts = [nn.Linear(2, 6), nn.Tanh(), *norm, nn.Linear(6, 1)]
    model, x = nn.Sequential(*parts).double(), torch.randn(8, 2).double()

    def closure():
        at = x.clone().requires_grad_()
        u = g = model(at)
        for _ in range(order):
            (g,) = torch.autograd.grad(g.sum(), at, create_graph=True)
        return (g.sum(1) + u[:, 0]).square().mean()

    return model, closure


def test_gradients_of_gradients_inside_the_closure():
    model, closure = coordinates(2, [nn.LayerNorm(6)])
    penalty = seht.HessianTrace(model, weight=1e-3, seed=1)
    with pytest.raises(RuntimeError, match=r"by the closure and once more by the training.*write"):
        penalty(closure)
    assert penalty.step == 0


@pytest.mark.parametrize("order, norm", [(1, [nn.LayerNorm(6)]), (2, [])])
def test_what_is_right_passes(order, norm):
    model, closure = coordinates(order, norm)
    assert off(model, closure) < 1e-5
