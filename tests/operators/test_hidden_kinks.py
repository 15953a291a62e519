"""Kinks where they are easily overlooked: as operators of aten, inside ``torch.vmap``, in writes
that autograd does not see.

As in ``test_kinks.py`` a coarse step crosses many kinks: what is not frozen goes wrong there.
"""

import pytest
import torch
import torch.nn.functional as F
from kinked import IMAGE, ROW, problem
from reference import gradient, relative
from torch import nn

import seht

aten = torch.ops.aten
PLACES = torch.arange(ROW[1])
GRID = F.affine_grid(0.7 * torch.eye(2, 3).double().repeat(3, 1, 1), (3, 3, 6, 6), False)


class Each(nn.Module):
    """A network called for each row by itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(ROW[1], 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, z):
        weights = dict(self.net.named_parameters())
        return torch.vmap(lambda row: torch.func.functional_call(self.net, weights, (row,)))(z)


# What an exported model is made of, and the functions beneath torch.nn.functional.
OPERATORS = {
    "relu": aten.relu,
    "relu.default": aten.relu.default,
    "clamp": lambda z: aten.clamp.default(z, -0.3, 0.4),
    "gt": lambda z: z * aten.gt.Scalar(z, 0.1),
    "max": lambda z: aten.max.dim(z, 1)[0],
    "detach": lambda z: z * aten.detach.default(z).exp(),
    "elu": lambda z: aten.elu.default(z, 0.7, 1.3, 0.5),
    "elu-scale": lambda z: torch._C._nn.elu(z, 0.7, 1.3, 0.5),
    "amax-masked": lambda z: z.masked_fill(PLACES % 3 == 0, -torch.inf).amax(1),
    "max-masked": lambda z: z * z.masked_fill(PLACES % 3 == 0, -torch.inf).max(),
    "softplus-low": lambda z: F.softplus(z, 2.0, 0.3),
}
IMAGES = {
    "max_pool2d": lambda z: aten.max_pool2d.default(z, [2, 2]),
    "with_indices": lambda z: aten.max_pool2d_with_indices.default(z, [2, 2])[0],
    "nn.with_indices": lambda z: torch._C._nn.max_pool2d_with_indices(z, 2)[0],
    "adaptive": lambda z: aten.adaptive_max_pool2d.default(z, [3, 3])[0],
    "nn.adaptive": lambda z: torch._C._nn.adaptive_max_pool2d(z, [3, 3])[0],
    "grid_sample-input": lambda z: F.grid_sample(z, GRID, align_corners=False),
}
TRANSFORMS = {
    "relu": torch.vmap(torch.relu),
    "clamp": torch.vmap(lambda row: row.clamp(-0.3, 0.4)),
    "where": torch.vmap(lambda row: torch.where(row > 0, row, row.square())),
    "sort": torch.vmap(lambda row: row.sort()[0] * PLACES / 40),
    "amax": torch.vmap(lambda row: row * row.amax()),
    "max_pool": torch.vmap(lambda row: F.max_pool1d(row[None], 2)),
    "detach": torch.vmap(lambda row: row * row.detach()),
    "model": Each(),
    "func.grad": torch.func.grad(lambda z: z.abs().pow(3).sum()),
    "func.jvp": lambda z: torch.func.jvp(lambda y: y.relu().square(), (z,), (z,))[1],
    "vmap-of-grad": torch.vmap(torch.func.grad(lambda row: F.leaky_relu(row).pow(3).sum())),
}


def written_detached(z):
    t = (1.0 * z).detach()
    t.mul_(2)
    return z * t


def written_without_grad(z):
    y = 1.0 * z
    with torch.no_grad():
        y.clamp_(-0.3, 0.4)
    return y * z


def masked_without_grad(z):
    y = 1.0 * z
    with torch.no_grad():
        y.masked_fill_(PLACES % 3 == 0, -torch.inf).mul_(1.5)
    return y.softmax(1) * z


def assigned(z):
    """A binarised activation, as straight-through estimators were once written."""
    y = 1.0 * z
    y.data = y.data.sign()
    return y * z


def own_gradient(z):
    y = z.detach().requires_grad_()
    y.pow(3).sum().backward()
    return z * y.grad


def same_dtype(z):
    """``to`` that changes nothing returns its argument, which is no detached tensor."""
    y = (1.0 * z).to(z.dtype)
    y.mul_(2)
    return y.relu()


WRITES = (
    written_detached, written_without_grad, masked_without_grad, assigned, own_gradient, same_dtype,
)  # fmt: skip


def estimate(function, shape, **options):
    model, closure, leaves = problem(function, shape)
    trace = seht.hessian_trace(model, closure, seed=3, **options)
    return gradient(trace, leaves)


def check(function, shape=ROW):
    truth = estimate(function, shape, engine="autograd")
    assert relative(estimate(function, shape, engine="difference"), truth) < 5e-6
    assert relative(estimate(function, shape, engine="difference", kappa=0.1), truth) < 0.15


@pytest.mark.parametrize("id", OPERATORS)
def test_operators(id):
    check(OPERATORS[id])


@pytest.mark.parametrize("id", IMAGES)
def test_operators_on_images(id):
    check(IMAGES[id], IMAGE)


@pytest.mark.parametrize("id", TRANSFORMS)
def test_transforms(id):
    check(TRANSFORMS[id])


@pytest.mark.parametrize("function", WRITES, ids=lambda f: f.__name__)
def test_unseen_writes(function):
    check(function)


def into_data(z):
    y = 1.0 * z
    y.data.masked_fill_(PLACES % 3 == 0, -2.0)
    return y * z


def into_detached(z):
    y = 1.0 * z
    y.view(-1).detach()[:9].zero_()
    return y * z


REFUSED = {
    "data": (into_data, r"x\.data also writes into x.*clone"),
    "detach": (into_detached, r"x\.data also writes into x.*clone"),
    "logit_": (lambda z: (0.1 * z + 0.5).logit_(0.2), "logit_"),
    "renorm_": (lambda z: (1.0 * z).renorm_(2, 0, 1.0), "renorm_"),
    "rmod": (lambda z: (1.0 * z).__rmod__(torch.full(ROW, 3.0)), "__rmod__|remainder"),
}


@pytest.mark.parametrize("id", REFUSED)
def test_refused(id):
    function, words = REFUSED[id]
    with pytest.raises(seht.KinkError, match=words):
        estimate(function, ROW, engine="difference")


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("function", [TRANSFORMS["clamp"], written_without_grad])
def test_the_lean_form(function, curvature):
    found = []
    for lean in (False, True):
        model, closure, leaves = problem(function)
        penalty = seht.HessianTrace(model, weight=1.0, seed=3, curvature=curvature, kappa=0.01)
        penalty.backward(closure) if lean else penalty(closure).backward()
        found.append([torch.zeros_like(w) if w.grad is None else w.grad for w in leaves])
    assert relative(found[1], found[0]) < 1e-9
