"""Losses of complex numbers: spectra, their magnitudes and angles.

The truth is the same loss with the transform as a matrix of real numbers.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import every_engine
from reference import SEED, gradient, relative
from stepping import rows
from torch import nn

import seht
from seht import measure

X, _ = rows()
T = torch.linspace(0, 3, 40).double().view(8, 5).cos()
TURNS = torch.outer(torch.arange(5.0), torch.arange(5.0)).double() * (2 * torch.pi / 5)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)).double()


def parts(z):
    return z @ TURNS.cos(), -z @ TURNS.sin()


def size(z):
    real, imaginary = parts(z)
    return (real**2 + imaginary**2).sqrt()


def far(a, b):
    """|a - b| without an absolute value in the graph."""
    return ((a - b) * (a - b).detach().sign()).mean()


def phase(z):
    real, imaginary = parts(z + 0.1 * T)
    return torch.atan2(imaginary[:, 1:3], real[:, 1:3])


fft = torch.fft.fft
PAIRS = {
    "magnitude": (lambda z: fft(z).abs().mean(), lambda z: size(z).mean()),
    "L1 of magnitudes": (
        lambda z: F.l1_loss(fft(z).abs(), fft(T[: len(z)]).abs()),
        lambda z: far(size(z), size(T[: len(z)])),
    ),
    "norm of magnitudes": (
        lambda z: torch.linalg.vector_norm(fft(z).abs() - 1, 1) / 40, lambda z: far(size(z), 1.0),
    ),
    "magnitude twice": (lambda z: fft(z).abs().abs().mean(), lambda z: size(z).mean()),
    "log magnitude": (
        lambda z: F.l1_loss((fft(z).abs() + 1).log(), T), lambda z: far((size(z) + 1).log(), T),
    ),
    "complex L1": (lambda z: F.l1_loss(fft(z), fft(T)), lambda z: size(z - T).mean()),
    "phase": (
        lambda z: (fft(z + 0.1 * T)[:, 1:3].angle() - 1).abs().mean(),
        lambda z: far(phase(z), 1.0),
    ),
    "direction": (
        lambda z: fft(z).sgn().real.square().mean(),
        lambda z: (parts(z)[0] / size(z)).square().mean(),
    ),
    "power": (
        lambda z: torch.view_as_real(fft(z)).square().sum(-1).mean(),
        lambda z: size(z).square().mean(),
    ),
}  # fmt: skip


@every_engine
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("name", PAIRS)
def test_complex_losses(name, curvature, engine):
    """A one-sided tr(G) has an error of first order in its step, some 1e-6 here."""
    model, (ours, truth) = network(), PAIRS[name]
    leaves = list(model.parameters())
    ask = lambda loss, engine: seht.hessian_trace(
        model, lambda: loss(model(X)), engine=engine, curvature=curvature, seed=SEED
    )
    found, expected = ask(ours, engine), ask(truth, "autograd")
    assert found.item() == pytest.approx(expected.item(), rel=5e-5)
    assert relative(gradient(found, leaves), gradient(expected, leaves)) < 5e-5


@pytest.mark.parametrize("name", PAIRS)
def test_check(name):
    loss = PAIRS[name][0]
    report = seht.check(network(), lambda model, x: loss(model(x)), X, directions=2)
    assert report.ok, str(report)


def test_exact_and_measured():
    model = network()
    ours, truth = PAIRS["L1 of magnitudes"]
    exact = [seht.exact_trace(model, lambda f=f: f(model(X))).item() for f in (ours, truth)]
    assert exact[0] == pytest.approx(exact[1], rel=1e-9)
    top = [
        measure.eigenvalues(model, lambda m, batch, f=f: f(m(batch[0])), [(X, T)]).largest[0]
        for f in (ours, truth)
    ]
    assert top[0] == pytest.approx(top[1], rel=1e-6)


@every_engine
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize(
    "spelling", [torch.abs, torch.Tensor.abs, abs], ids=["abs", ".abs", "built-in"]
)
def test_silence(spelling, curvature, engine):
    """Where the modulus is 0 nothing comes from it, of any order: as if it were not there."""
    model = network()
    leaves = list(model.parameters())
    loud = torch.ones(8, 1).double()
    loud[:3] = 0
    ask = lambda loss, engine: seht.hessian_trace(
        model, loss, engine=engine, curvature=curvature, seed=SEED
    )
    found = ask(lambda: (spelling(fft(model(X) * loud)) - 1).square().mean(), engine)
    expected = ask(lambda: (size(model(X[3:])) - 1).square().sum() / 40, "autograd")
    assert found.item() == pytest.approx(expected.item(), rel=5e-5)
    assert relative(gradient(found, leaves), gradient(expected, leaves)) < 5e-5
