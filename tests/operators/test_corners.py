"""Exactly at a kink, where a derivative is a convention: the engines have PyTorch's, and one.

The weights are such that every entry of the hidden layer lies on the corner, and moves away from
it with them.
"""

import pytest
import torch
import torch.nn.functional as F
from reference import relative
from torch import Tensor, nn

import seht


def zeros(z: Tensor) -> Tensor:
    return torch.zeros_like(z)


def two(z: Tensor) -> Tensor:
    """Equal at 0, and of one slope there."""
    return torch.stack([z, z.sin()])


def margins(z: Tensor) -> Tensor:
    return torch.stack([z.flatten(), 0 * z.flatten()], 1)


CORNERS = {
    "relu": (F.relu, 0),
    "relu-inplace": (lambda z: F.relu(1 * z, inplace=True), 0),
    "relu6": (F.relu6, 0, 6),
    "leaky_relu": (lambda z: F.leaky_relu(z, 0.2), 0),
    "rrelu": (F.rrelu, 0),
    "rrelu-training": (lambda z: F.rrelu(z, training=True), 0),
    "elu": (F.elu, 0),
    "elu-alpha": (lambda z: F.elu(z, 0.6), 0),
    "elu_": (lambda z: F.elu_(1 * z, 0.6), 0),
    "selu": (F.selu, 0),
    "selu_": (lambda z: torch.selu_(1 * z), 0),
    "celu": (F.celu, 0),
    "celu-alpha": (lambda z: F.celu(z, 0.5), 0),
    "prelu": (lambda z: F.prelu(z, z.new_tensor([0.3])), 0),
    "prelu-channels": (lambda z: torch.prelu(z, torch.linspace(0.1, 0.5, 4).double()), 0),
    "prelu-learnt": (lambda z: z.prelu(z.mean() + 0.3), 0),
    "hardswish": (F.hardswish, -3, 3),
    "hardsigmoid": (F.hardsigmoid, -3, 3),
    "hardtanh": (F.hardtanh, -1, 1),
    "softshrink": (F.softshrink, -0.5, 0.5),
    "hardshrink": (F.hardshrink, -0.5, 0.5),
    "threshold": (lambda z: F.threshold(z, 0.5, -1), 0.5),
    "clamp": (lambda z: z.clamp(-0.5, 0.75), -0.5, 0.75),
    "clamp_min": (lambda z: z.clamp_min(0.25), 0.25),
    "abs": (torch.abs, 0),
    "sign": (lambda z: z * z.sign(), 0),
    "maximum": (lambda z: torch.maximum(z, z.sin()), 0),
    "maximum-constant": (lambda z: torch.maximum(z, zeros(z)), 0),
    "minimum": (lambda z: torch.minimum(z, z.sin()), 0),
    "fmax": (lambda z: torch.fmax(z, z.sin()), 0),
    "amax": (lambda z: two(z).amax(0), 0),
    "max": (lambda z: two(z).max(0).values, 0),
    "sort": (lambda z: two(z).sort(0).values[0], 0),
    "cummax": (lambda z: two(z).cummax(0).values[1], 0),
    "where": (lambda z: torch.where(z > 0, z, 0.1 * z), 0),
    "round": (lambda z: z * z.round(), 0.5),
    "floor": (lambda z: z * z.floor(), 1),
    "frac": (torch.frac, 0, 1),
    "softsign": (F.softsign, 0),
    "softplus": (lambda z: F.softplus(z, threshold=2), 2),
    "softplus-beta": (lambda z: F.softplus(z, 2.0, 4.0), 2),
    "l1_loss": (lambda z: F.l1_loss(z, zeros(z), reduction="none"), 0),
    "smooth_l1_loss": (lambda z: F.smooth_l1_loss(z, zeros(z), reduction="none"), 0, 1, -1),
    "huber_loss": (lambda z: F.huber_loss(z, zeros(z), "none", 0.5), 0, 0.5, -0.5),
    "hinge_embedding_loss": (
        lambda z: F.hinge_embedding_loss(z, zeros(z) - 1, reduction="none"), 1,
    ),
    "margin_ranking_loss": (
        lambda z: F.margin_ranking_loss(z, zeros(z), zeros(z) + 1, reduction="none"), 0,
    ),
    "multi_margin_loss": (
        lambda z: z + F.multi_margin_loss(
            margins(z), torch.ones(z.numel(), dtype=torch.long), reduction="none"
        ).view(z.shape), -1,
    ),
    "norm-1": (lambda z: z.unsqueeze(-1).norm(p=1, dim=-1), 0),
    "foreach_abs": (lambda z: torch._foreach_abs([z])[0], 0),
    "foreach_sign": (lambda z: z * torch._foreach_sign([z])[0], 0),
    "foreach_clamp_max": (lambda z: torch._foreach_clamp_max([z], 0.5)[0], 0.5),
    "foreach_clamp_min": (lambda z: torch._foreach_clamp_min([z], [zeros(z)])[0], 0),
    "foreach_maximum": (lambda z: torch._foreach_maximum([z], 0.5)[0], 0.5),
    "foreach_minimum": (lambda z: torch._foreach_minimum([z], [z.sin()])[0], 0),
    "foreach_norm": (lambda z: z * torch._foreach_norm([z], 1)[0], 0),
}  # fmt: skip
CASES = [(name, at) for name, (_, *corners) in CORNERS.items() for at in corners]


class Hidden(nn.Module):
    """``a b + at`` with a = 0: on the corner, with slope b in a."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 4).double())
        self.b = nn.Parameter(torch.linspace(0.5, 1.5, 8).double().view(2, 4))
        self.c = nn.Parameter(torch.linspace(-1, 1, 8).double().view(2, 4))
        self.at = at

    def forward(self) -> Tensor:
        return self.a * self.b + self.at


def problem(name, at):
    model, function = Hidden(at), CORNERS[name][0]

    def closure():
        z = model()
        y = function(z) + 1.3 * z.sin()
        return (y * torch.linspace(0.3, 1, 8).double().view(2, 4) + (y * model.c + 0.3).sin()).sum()

    torch.manual_seed(1)
    return model, closure, list(model.parameters())


def found(name, at, engine):
    """Trace, its gradient, and that of the loss."""
    model, closure, leaves = problem(name, at)
    loss, trace = seht.loss_and_trace(model, closure, engine=engine, seed=3)
    g = [torch.autograd.grad(t, leaves, retain_graph=True, materialize_grads=True)
         for t in (loss, trace)]  # fmt: skip
    return trace.item(), g[1], g[0]


@pytest.mark.parametrize(("name", "at"), CASES)
def test_the_engines_agree(name, at):
    (value, g, _), (ours, our_g, _) = (found(name, at, e) for e in ("autograd", "difference"))
    assert ours == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert relative(our_g, g) < 1e-5


@pytest.mark.parametrize(("name", "at"), CASES)
def test_the_loss_has_its_own_gradient(name, at):
    _, closure, leaves = problem(name, at)
    plain = torch.autograd.grad(closure(), leaves)
    for engine in ("autograd", "difference"):
        assert relative(found(name, at, engine)[2], plain) < 1e-7


@pytest.mark.parametrize("order", [2, 3])
def test_a_norm_of_zero_is_flat(order):
    """Autograd has the slope 0 there, and no second derivative; a step would see a kink."""
    model = Hidden(0.0)
    size = lambda z: torch.linalg.vector_norm(z, order, dim=1)
    closure = lambda: (size(model()) + size(model() + 1) + model.c.sin().sum()).square().mean()
    trace = seht.hessian_trace(model, closure, seed=3, engine="difference")
    beside = lambda: (size(model() + 1) + model.c.sin().sum()).square().mean()
    expected = seht.hessian_trace(model, beside, seed=3, engine="autograd")
    assert trace.item() == pytest.approx(expected.item(), rel=1e-5)
