"""Functions that are run by their parts, before the first drawn layer of SEHT-D: they repeat.

The prefix is kept, so that a perturbed pass never comes to their parts. The look at the sequence
of operations must not miss them, on the first steps or later.
"""

import pytest
import torch
import torch.nn.functional as F
from stepping import Drawn, assert_gradients, gradients, penalise
from torch import nn

import seht

COMPOSITES = {
    "hardswish": F.hardswish,
    "hardswish-inplace": lambda h: F.hardswish(1 * h, inplace=True),
    "celu": F.celu,
    "softsign": F.softsign,
    "softplus": lambda h: F.softplus(h, threshold=1.0),
    "normalize": F.normalize,
    "normalize-1": lambda h: F.normalize(h, p=1),
    "norm-1": lambda h: h / h.norm(p=1, dim=1, keepdim=True),
    "vector_norm-inf": lambda h: h / torch.linalg.vector_norm(h, torch.inf, dim=1, keepdim=True),
    "matrix_norm-1": lambda h: h / torch.linalg.matrix_norm(h, 1),
    "dist": lambda h: h * torch.dist(h, h.flip(1), 1),
    "pairwise_distance": lambda h: h * F.pairwise_distance(h, h.flip(1), 1, keepdim=True),
    "lp_pool1d": lambda h: F.lp_pool1d(h, 2, 2).repeat(1, 2),
    "lp_pool2d": lambda h: h * F.lp_pool2d(h.view(6, 1, 2, 4), 2, 2).mean(),
    "l1_loss": lambda h: h * F.l1_loss(h, torch.zeros_like(h)),
    "smooth_l1_loss": lambda h: h * F.smooth_l1_loss(h, torch.zeros_like(h)),
    "huber_loss": lambda h: h * F.huber_loss(h, torch.zeros_like(h)),
    "gaussian_nll_loss": lambda h: h * F.gaussian_nll_loss(h, torch.zeros_like(h), h.square()),
    "triplet_margin_loss": lambda h: h * F.triplet_margin_loss(h, h.flip(1), h.flip(0)),
    "cosine_embedding_loss": lambda h: h * F.cosine_embedding_loss(h, h.flip(1), torch.ones(6)),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, 2.0, hard=True) * h,
    "foreach_abs": lambda h: h * torch.stack(torch._foreach_abs([h, h.sin()])).sum(0),
    "vmap": lambda h: torch.vmap(lambda row: row.sin() * row.abs().sum())(h),
    "vmap-grad": lambda h: torch.vmap(torch.func.grad(lambda row: row.square().sum().sin()))(h),
    "func.grad": lambda h: h * torch.func.grad(lambda z: z.sin().relu().sum())(h),
    "jvp": lambda h: torch.func.jvp(torch.sin, (h,), (h.cos(),))[1],
}


def build(name):
    """Four linear layers, the function behind each of the first two."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    x, y = torch.randn(6, 8).double(), torch.arange(6) % 3
    f = COMPOSITES[name]

    def closure():
        return F.cross_entropy(model[3](model[2](f(model[1](f(model[0](x)))))), y)

    torch.manual_seed(4)
    return model, closure


def step(name, engine, place, **options):
    model, closure = build(name)
    penalty = penalise(model, closure, engine, estimator=Drawn(place, probes=2), **options)
    return penalty.last.trace, gradients(model.parameters())


@pytest.mark.parametrize("name", COMPOSITES)
def test_it_is_right(name):
    """With the prefix kept, and its sequence not looked at."""
    for place, form in ((1, "lean"), (3, "scalar")):
        value, wanted = step(name, "autograd", place)
        found, got = step(name, form, place, warm=True)
        assert found == pytest.approx(value, rel=1e-5)
        assert_gradients(got, wanted)


@pytest.mark.parametrize("name", COMPOSITES)
def test_it_repeats(name):
    """With the prefix kept, and its sequence looked at."""
    for place in (1, 2, 3):
        model, closure = build(name)
        seht.hessian_trace(model, closure, estimator=Drawn(place), seed=1, engine="difference")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSITES)
def test_it_repeats_whatever_is_drawn(name):
    for seed in range(60):
        model, closure = build(name)
        seht.hessian_trace(model, closure, estimator="seht-d", seed=seed, engine="difference")
