"""What several test files share: every engine, a small problem, and snapshots of all its state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seht.engines import ENGINES

every_engine = pytest.mark.parametrize("engine", sorted(ENGINES))


def network(*, norm=True, dropout=0.0, dtype=torch.float64, seed=3):
    """A ReLU network with three weights of two or more dimensions."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(),
        nn.Dropout(dropout), nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3),
    ).to(dtype)  # fmt: skip


def batch(dtype=torch.float64, seed=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.arange(6) % 3


def closure_of(model, data=None):
    x, y = data or batch(next(model.parameters()).dtype)
    return lambda: F.cross_entropy(model(x), y)


def gradient(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def records(penalty, closure, calls):
    """What the penalty notes on each of so many steps."""
    out = []
    for _ in range(calls):
        penalty(closure)
        out.append(penalty.last)
    return out


class Snapshot:
    """Weights, buffers, gradients and random state of a moment."""

    def __init__(self, model):
        self.state = copy.deepcopy(model.state_dict())
        self.gradient = gradient(model)
        self.random = torch.get_rng_state()
        self.seed = torch.initial_seed()

    def assert_same(self, other, *, random=True, buffers=True):
        """Bit for bit."""
        for name, tensor in self.state.items():
            if buffers or name in self.gradient:
                assert torch.equal(tensor, other.state[name]), name
        for name, tensor in self.gradient.items():
            if tensor is None:
                assert other.gradient[name] is None, name
            else:
                assert torch.equal(tensor, other.gradient[name]), name
        if random:
            assert torch.equal(self.random, other.random)
            assert self.seed == other.seed


def own_state(penalty):
    """Without the engine's first step size, which depends on nothing but the dtype."""
    return {k: v for k, v in penalty.state_dict().items() if k != "engine"}


def same(a, b):
    """Whether two nested values are one, tensors and arrays bit for bit."""
    if isinstance(a, torch.Tensor) or hasattr(a, "tobytes"):
        return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Square(torch.autograd.Function):
    """Saves its input past our modes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Reverse(torch.autograd.Function):
    """Turns the gradient round; its forward returns a view of its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad
