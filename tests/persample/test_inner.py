"""Closures that take a gradient themselves (R1, WGAN-GP, physics-informed losses), with SEHT-S.

The reference runs every example alone at its own perturbed weights and differentiates that twice in
the step, in float64; nothing of the library's rules or differences is used.
"""

import math
import re

import persample_reference as reference
import pytest
import torch
import torch.nn.functional as F
from persample_cases import N
from torch import nn
from torch.func import functional_call

import seht
from seht import measure, probes

SEED = 3


def make(kind="linear"):
    torch.manual_seed(1)
    if kind == "conv":
        model = nn.Sequential(
            nn.Conv1d(1, 3, 2), nn.Tanh(), nn.ConvTranspose1d(3, 2, 2), nn.Softplus(),
            nn.Flatten(), nn.Linear(6, 1, bias=False),
        )  # fmt: skip
    else:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Identity(), nn.Linear(4, 1))
    x = torch.randn(N, 1, 3) if kind == "conv" else torch.randn(N, 3)
    return model.double(), x.double()


def leaf(x):
    return x.detach().clone().requires_grad_()


def slope(z, x):
    return torch.autograd.grad(z.sum(), x, create_graph=True)[0]


def r1(net, x):
    x = leaf(x)
    z = net(x)
    return F.softplus(-z).mean() + 0.5 * slope(z, x).flatten(1).pow(2).sum(1).mean()


def wgan(net, x):
    x = leaf(x)
    z = net(x)
    return z.mean() + (slope(z, x).flatten(1).norm(dim=1) - 1).pow(2).mean()


def physics(net, x):
    """u'' + sin(u) = 0: coordinates are joined inside, the second derivative is taken, and the
    boundary is built in by a factor.
    """
    t, rest = leaf(x.flatten(1)[:, :1]), x.flatten(1)[:, 1:]
    u = net(torch.cat([t, rest], 1).view(x.shape)) * t * (1 - t)
    first = slope(u, t)
    return (slope(first, t) + u.sin()).pow(2).mean()


def hidden(net, x):
    """The gradient in what a layer puts out."""
    h = net[0](x)
    z = net[1:](h)
    return z.exp().mean() + slope(z, h).pow(2).mean()


def several(net, x):
    """Rows of a Jacobian at once, and weights on the outputs."""
    x = leaf(x)
    z = torch.cat([net(x), net(x).pow(2)], 1)
    rows = torch.eye(2, dtype=x.dtype).unsqueeze(1).expand(2, len(x), 2)
    (j,) = torch.autograd.grad(z, x, rows, create_graph=True, is_grads_batched=True)
    (g,) = torch.autograd.grad(z, x, z.detach(), create_graph=True)
    return j.pow(2).sum(0).mean() + g.pow(2).mean()


def functional(net, x):
    j = torch.autograd.functional.jacobian(lambda x: net(x).sum(0), leaf(x), create_graph=True)
    return j.pow(2).sum() / len(x) + net(x).pow(2).mean()


def forward_mode(net, x):
    with torch.autograd.forward_ad.dual_level():
        z = net(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        along = torch.autograd.forward_ad.unpack_dual(z).tangent
        return along.pow(2).mean() + net(x).pow(2).mean()


def in_a_weight(net, x):
    """Linear in the gradient of a sum."""
    loss = net(x).pow(2).mean()
    g = torch.autograd.grad(loss, net[3].weight, create_graph=True)[0]
    return loss + g.sum()


CLOSURES = {f.__name__: f for f in (r1, wgan, physics, hidden, several, functional, forward_mode)}
KINDS = [(name, "linear") for name in CLOSURES] + [("r1", "conv"), ("physics", "conv")]


class Moved:
    """A network at other weights, and its parts."""

    def __init__(self, model, weights):
        self.model, self.weights = model, weights

    def __call__(self, x):
        return functional_call(self.model, self.weights, (x,))

    def __getitem__(self, key):
        part = self.model[key]
        first = key.start if isinstance(key, slice) else key
        weights = {}
        for name, w in self.weights.items():
            place, _, rest = name.partition(".")
            if int(place) == first and not isinstance(key, slice):
                weights[rest] = w
            elif int(place) >= first and isinstance(key, slice):
                weights[name] = w  # a slice keeps the names
        return Moved(part, weights)


def wanted(model, x, closure, seed):
    """The trace and its gradient, example by example."""
    s = reference.directions(probes.choose(model, "*").tensors, N, seed)
    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    parts = []
    for n in range(N):
        moved = {k: w + e * s[k][n] for k, w in model.named_parameters()}
        parts.append(closure(Moved(model, moved), x[n : n + 1]))
    (first,) = torch.autograd.grad(torch.stack(parts).mean(), e, create_graph=True)
    (trace,) = torch.autograd.grad(first, e, create_graph=True)
    return trace.item(), torch.autograd.grad(
        trace, list(model.parameters()), materialize_grads=True
    )


def penalised(model, x, closure, *, lean):
    weights = list(model.parameters())
    plain = torch.autograd.grad(closure(model, x), weights, materialize_grads=True)
    penalty = seht.HessianTrace(
        model, weight=10.0, estimator="seht-s", params="*", seed=SEED, kappa=1e-4
    )
    if lean:
        penalty.backward(lambda: closure(model, x))
    else:
        penalty(lambda: closure(model, x)).backward()
    got = [
        (torch.zeros_like(w) if w.grad is None else w.grad) - g
        for w, g in zip(weights, plain, strict=True)
    ]
    for w in weights:
        w.grad = None
    return penalty.last, [g / 10 for g in got]


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_value_and_gradient(name, kind, lean):
    model, x = make(kind)
    record, got = penalised(model, x, CLOSURES[name], lean=lean)
    assert record.shared == ()
    trace, gradient = wanted(model, x, CLOSURES[name], record.seed)
    assert record.trace == pytest.approx(trace, rel=1e-5)
    size = math.sqrt(sum(float(g.pow(2).sum()) for g in gradient))
    error = math.sqrt(sum(float((a - b).pow(2).sum()) for a, b in zip(got, gradient, strict=True)))
    assert error < 1e-4 * size


@pytest.mark.parametrize("name", [*CLOSURES, "in_a_weight"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_measured(name, per_layer):
    """measure.trace keeps the graph by itself; every example has its own probe."""
    model, x = make()
    closure = CLOSURES.get(name, in_a_weight)
    exact = seht.exact_trace(model, lambda: closure(model, x)).item()
    found = measure.trace(
        model, lambda m, batch: closure(m, batch[0]), (x,), probes=100, per_layer=per_layer
    )
    assert found.method == "per-sample"
    assert abs(found.estimate - exact) < 4 * found.stderr
    assert found.stderr < abs(exact) + 1  # or the line above says nothing


def squared_in_a_weight(net, x):
    loss = net(x).pow(2).mean()
    return loss + torch.autograd.grad(loss, net[3].weight, create_graph=True)[0].pow(2).sum()


def mixed_before(net, x):
    """The inputs' mean is taken before the model is called."""
    x = leaf(x)
    mean = x.mean(0)
    z = net(x) * mean.sum()
    return slope(z, x).pow(2).mean()


def weighed_by_all(net, x):
    x = leaf(x)
    z = net(x)
    (g,) = torch.autograd.grad(z, x, z.mean() * torch.ones_like(z), create_graph=True)
    return g.pow(2).mean()


def read(net, x):
    x = leaf(x)
    z = net(x)
    z.sum().backward(create_graph=True, inputs=[x])
    return x.grad.pow(2).mean()


def read_from_weights(net, x):
    net(x).pow(2).mean().backward(create_graph=True)
    found = net(x).pow(2).mean() + sum(p.grad.pow(2).sum() for p in net.parameters())
    for p in net.parameters():
        p.grad = None
    return found


REFUSED = {
    squared_in_a_weight: "grad adds examples up before pow",
    mixed_before: "mean adds examples up",
    weighed_by_all: "mean adds examples up before grad",
    read: r"read from \.grad .*torch\.autograd\.grad",
    read_from_weights: r"read from \.grad .*torch\.autograd\.grad",
    lambda net, x: torch.func.grad(lambda x: net(x).sum())(x).pow(2).mean(): r"torch\.func",
    lambda net, x: torch.func.jvp(net, (x,), (x,))[1].pow(2).mean(): r"torch\.func",
    lambda net, x: torch.func.vjp(net, x)[1](x[:, :1])[0].pow(2).mean(): r"torch\.func",
    lambda net, x: torch.vmap(torch.func.jacrev(net))(x).pow(2).mean(): r"torch\.func",
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("closure", REFUSED, ids=lambda f: f.__name__)
def test_refused_in_words_and_measured_otherwise(closure):
    model, x = make()
    with pytest.raises(seht.ExampleError, match=REFUSED[closure]):
        seht.hessian_trace(model, lambda: closure(model, x), estimator="seht-s", batch_dim=0)
    exact = seht.exact_trace(model, lambda: closure(model, x)).item()
    found = measure.trace(model, lambda m, batch: closure(m, batch[0]), (x,), probes=100)
    assert found.method == "shared"
    assert abs(found.estimate - exact) < 4 * found.stderr
    assert re.search(REFUSED[closure], " ".join(found.notes))
