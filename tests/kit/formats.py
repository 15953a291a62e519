"""Networks whose tensors lie in memory in another order than usual, with random masks in them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reference import gradient, relative
from torch import Tensor, nn

import seht

SEED = 5


class Net(nn.Module):
    """A smooth first layer, ``change`` (with a kink) and ``draw`` behind it, a linear head."""

    def __init__(self, first: nn.Module, change: Callable[[Tensor], Tensor], draw: nn.Module):
        super().__init__()
        self.first, self.change, self.draw = first, change, draw
        self.head = nn.LazyLinear(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.draw(self.change(self.first(x))).flatten(1))


class Draw(nn.Module):
    """A function that draws random numbers, with weights of its own where it needs some."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


def images(model: Callable[[], nn.Module], shape=(4, 3, 6, 6)):
    """``(model, closure, leaves)`` on a batch with the channels last."""
    torch.manual_seed(0)
    net = model().double()
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    x = torch.randn(shape).double()
    x = x.to(memory_format=form) if form else x
    y = torch.arange(shape[0]) % 5
    net(x)  # the lazy head
    closure = lambda: F.cross_entropy(net(x), y)
    torch.manual_seed(1)
    return net, closure, list(net.parameters())


def assert_engines_agree(build, **options):
    found = []
    for engine in ("autograd", "difference"):
        model, closure, leaves = build()
        trace = seht.hessian_trace(model, closure, seed=SEED, engine=engine, **options)
        found.append((trace.item(), gradient(trace, leaves)))
    (value, g), (ours, our_g) = found
    assert ours == pytest.approx(value, rel=1e-5)
    assert relative(our_g, g) < 5e-6
