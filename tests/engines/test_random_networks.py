"""Random small networks with kinks, norms and dropout: the two engines agree.

100 networks in the fast run, 10,000 in the long one.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import ACTIVATIONS, LOSSES, NORMS, norm_layer
from reference import gradient, norm, relative
from torch import Tensor, nn

import seht

EXAMPLES = 10_000 if os.environ.get("SEHT_TESTS") == "all" else 100
PARTS = EXAMPLES // 2_500 or 1  # so that several processes can share them


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Residual(nn.Module):
    """x plus a function of x that keeps its shape."""

    def __init__(self, width: int, conv: bool) -> None:
        super().__init__()
        self.layer = nn.Conv1d(width, width, 1) if conv else nn.Linear(width, width)

    def forward(self, x):
        return x + self.layer(x).relu_()


KINKS = {
    "relu-inplace": lambda: nn.ReLU(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(-0.5, 0.7),
    "hardswish": nn.Hardswish,
    "prelu": nn.PReLU,
    "softsign": nn.Softsign,
    "selu": nn.SELU,
    "abs": lambda: Apply(torch.abs),
    "clamp": lambda: Apply(lambda x: x.clamp(min=-0.3)),
    "where": lambda: Apply(lambda x: torch.where(x > 0.1, x * x, -x)),
    "straight-through": lambda: Apply(lambda x: x + (x.round() - x).detach()),
    "competition": lambda: Apply(lambda x: x * (x >= x.amax(1, keepdim=True)) + 0.1 * x),
    "maximum": lambda: Apply(lambda x: torch.maximum(x, x.flip(1))),
}
ALL = {**ACTIVATIONS, **KINKS}
EXTRAS = ["none", "dropout", "max-pool", "max-norm", "residual", "sort"]


def extra_layer(name: str, width: int, conv: bool) -> list[nn.Module]:
    if name == "dropout":
        return [nn.Dropout(0.3)]
    if name == "max-pool" and conv:
        return [nn.MaxPool1d(2, 1)]
    if name == "max-norm":
        return [Apply(lambda x: x / (1 + x.abs().amax(1, keepdim=True)))]
    if name == "residual":
        return [Residual(width, conv)]
    if name == "sort":
        return [Apply(lambda x: x.sort(1).values)]
    return []


@dataclass(frozen=True)
class Spec:
    """What hypothesis prints when a property fails: enough to build the network again."""

    conv: bool
    layers: tuple[tuple[int, str, str, str], ...]
    """(width, norm, activation, extra) of each hidden layer."""
    loss: str
    seed: int

    def build(self):
        """``(model, closure, leaves)``, the same at every call."""
        torch.manual_seed(self.seed)
        x = torch.randn(5, 3, *([5] if self.conv else []))
        model, channels = nn.Sequential(), 3
        for width, kind, activation, extra in self.layers:
            layer = nn.Conv1d(channels, width, 2) if self.conv else nn.Linear(channels, width)
            model.extend([layer, *norm_layer(kind, width, self.conv), ALL[activation]()])
            model.extend(extra_layer(extra, width, self.conv))
            channels = width
        model.append(nn.Flatten())
        model.append(nn.Linear(model(x).shape[1], 3))
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        y, t = torch.arange(5) % 3, torch.randn(5, 3).double()
        model, x = model.double(), x.double().requires_grad_()
        return model, lambda: LOSSES[self.loss](model(x), y, t), [*model.parameters(), x]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    conv = draw(st.booleans())
    layer = st.tuples(
        st.integers(3, 5),  # a norm over one or two numbers is a step function
        st.sampled_from(NORMS),
        st.sampled_from(sorted(ALL)),
        st.sampled_from(EXTRAS),
    )
    layers = draw(st.lists(layer, min_size=1, max_size=2 if conv else 3))
    loss, seed = draw(st.sampled_from(sorted(LOSSES))), draw(st.integers(0, 2**20))
    return Spec(conv, tuple(layers), loss, seed)


def estimate(spec: Spec, engine: str, **options) -> tuple[float, list[Tensor], list[Tensor]]:
    """The trace, its gradient and the loss's."""
    model, closure, leaves = spec.build()
    loss, trace = seht.loss_and_trace(model, closure, engine=engine, seed=3, **options)
    how = {"allow_unused": True, "materialize_grads": True}
    plain = torch.autograd.grad(loss, leaves, retain_graph=True, **how)
    return trace.item(), gradient(trace, leaves), list(plain)


def agree(spec: Spec, **options) -> None:
    value, g, plain = estimate(spec, "autograd", **options)
    # Rounding is relative to the gradient of the loss.
    floor = 1e-6 * norm(plain).item()

    def found(kappa: float) -> tuple[float, list[Tensor]]:
        ours, our_g, our_plain = estimate(spec, "difference", kappa=kappa, **options)
        # PyTorch's hardswish divides by 6 in float32, whatever the dtype.
        assert norm(plain) == 0 or relative(our_plain, plain) < 1e-7
        return ours, our_g

    def apart(ours: float, our_g: list[Tensor]) -> tuple[float, float]:
        """In units of the tolerance: 1e-5 of value and gradient."""
        gap = norm([a - b for a, b in zip(our_g, g, strict=True)]).item()
        return (
            abs(ours - value) / (1e-5 * abs(value) + floor + 1e-300),
            gap / (1e-5 * norm(g).item() + floor + 1e-300),
        )

    def distances(kappa: float) -> tuple[float, float]:
        return apart(*found(kappa))

    def extrapolated(kappa: float) -> tuple[float, float]:
        """Richardson: without the error of order e^2, which is another test that it is of it."""
        (one, one_g), (two, two_g) = found(kappa), found(2 * kappa)
        return apart(
            (4 * one - two) / 3, [(4 * a - b) / 3 for a, b in zip(one_g, two_g, strict=True)]
        )

    # Sharp bends (a norm over numbers that are almost equal) want a smaller step than the engine's
    # own, a gradient that is next to nothing a larger one. With the sharpest, where truncation ends
    # rounding has begun.
    best = distances(1e-4)
    tries = [(distances, kappa) for kappa in (1e-5, 1e-6, 1e-3, 3e-4)]
    for attempt, kappa in [*tries, *((extrapolated, kappa) for kappa in (1e-5, 2e-6, 5e-5))]:
        if max(best) >= 1:
            best = tuple(map(min, best, attempt(kappa)))
    assert max(best) < 1
    # Such steps hardly meet a kink. Larger ones do, and must be off by what their order foretells;
    # with a norm, or where that is much, nothing can be foretold.
    if all(norm in ("none", "batch-eval") for _, norm, _, _ in spec.layers):
        small = distances(1e-3)[1]
        for factor in (10, 40):
            foretold = factor**2 * small
            if foretold < 3e3:
                assert distances(factor * 1e-3)[1] < max(2e3, 5 * foretold)


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=EXAMPLES // PARTS)
@given(spec=specs())
def test_hessian(part, spec):
    agree(spec)


@settings(max_examples=EXAMPLES // 4)
@given(specs(), st.floats(0.2, 0.8), st.integers(1, 2))
def test_sparse_probes(spec, share, probes):
    """With what comes before the first drawn layer replayed."""
    agree(spec, estimator=seht.SehtD(prob=0.4, layer_prob=share, probes=probes))


@settings(max_examples=EXAMPLES // 4)
@given(specs())
def test_lean_form(spec):
    model, closure, leaves = spec.build()
    penalty = seht.HessianTrace(model, weight=0.1, engine="difference", seed=3)
    penalty(closure).backward()
    scalar = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
    model, closure, leaves = spec.build()
    penalty = seht.HessianTrace(model, weight=0.1, engine="difference", seed=3)
    penalty.backward(closure)
    lean = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
    gap = norm([a - b for a, b in zip(lean, scalar, strict=True)])
    assert gap <= 1e-5 * norm(scalar)
