"""Networks whose first part can be kept for the perturbed passes, or looks as if it could.

Each builder takes nothing and returns ``(model, closure)``; ``KEPT`` are those where the prefix of
the last tensor must be kept, ``DROPPED`` those where it must not.
"""

import torch
import torch.nn.functional as F
from helpers import Reverse, Square
from torch import nn

KEPT, DROPPED = {}, {}


def kept(builder):
    KEPT[builder.__name__] = builder
    return builder


def dropped(builder):
    DROPPED[builder.__name__] = builder
    return builder


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = torch.rand_like(x)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask


class Doubled(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Net(nn.Module):
    """Two convolutions and two linear maps, with something in the middle."""

    def __init__(self, middle=lambda net, h: h):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.middle = middle

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        h = self.norm2(self.conv2(h)).mean((2, 3))
        return self.head(self.middle(self, self.hidden(h)))


def images():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.arange(6) % 3


def made(model):
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    model, (x, y) = model.double(), images()
    return model, lambda: F.cross_entropy(model(x), y)


# --- kept -------------------------------------------------------------------------------------


@kept
def plain():
    return made(Net())


@kept
def residual_connections_in_place():
    class Residual(Net):
        def forward(self, x):
            h = F.relu(self.norm1(self.conv1(x)), inplace=True)
            t = self.norm2(self.conv2(h))
            t += h
            h = self.hidden(F.relu(t, inplace=True).mean((2, 3)))
            z = self.head(F.dropout(h.relu_(), 0.3))
            z += h[:, :3]
            return z

    return made(Residual())


@kept
def dropout():
    return made(Net(lambda net, h: F.dropout(h, 0.4)))


@kept
def parts_and_lists():
    def middle(net, h):
        a, b = h.chunk(2, 1)
        parts = h.split(2, 1)
        top = h.max(1, keepdim=True)
        return torch.cat([a.sin(), b], 1) + parts[0].mean() + top.values * top.indices

    return made(Net(middle))


@kept
def no_grad_and_random_numbers():
    def middle(net, h):
        with torch.no_grad():
            size, noise = h.std(), torch.rand_like(h)
        return F.dropout(h / size + noise, 0.2)

    return made(Net(middle))


@kept
def own_generator():
    generator = torch.Generator().manual_seed(6)

    def middle(net, h):
        return h + torch.randn(h.shape, generator=generator, dtype=h.dtype)

    return made(Net(middle))


@kept
def recurrent():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(10, 4, 2, dropout=0.3, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            out, (h, c) = self.lstm(x.view(6, 5, 10))
            return self.head(out[:, -1] + h[-1].sin() + c[0])

    return made(Recurrent())


@kept
def custom_function_in_the_middle():
    return made(Net(lambda net, h: Square.apply(h).tanh()))


@kept
def custom_function_right_before_the_end():
    """What it returns belongs to the pass, not to the prefix: or it would count twice."""
    return made(Net(lambda net, h: Square.apply(h)))


@kept
def custom_function_that_returns_a_view():
    return made(Net(lambda net, h: Reverse.apply(h)))


@kept
def custom_function_with_random_numbers():
    return made(Net(lambda net, h: Noisy.apply(h)))


@kept
def writes_within_the_prefix():
    def middle(net, h):
        out = torch.zeros_like(h)
        out[:, :3] = h[:, 3:]
        out[:, 3:].add_(h[:, :3])
        return out.mul_(h)

    return made(Net(middle))


@kept
def result_that_is_used_on_both_sides():
    class Both(Net):
        def forward(self, x):
            h = self.hidden(self.conv1(x).relu().mean((2, 3)))
            return self.head(h.tanh()) + h[:, :3].square()

    return made(Both())


@kept
def weight_inside_a_custom_function():
    """Its forward is seen."""

    class Hidden(Net):
        def forward(self, x):
            h = self.hidden(self.conv1(x).mean((2, 3)))
            return Product.apply(h, self.head.weight) * 1.5

    return made(Hidden())


# --- dropped ----------------------------------------------------------------------------------


@dropped
def result_that_is_written_later():
    class Later(Net):
        def forward(self, x):
            h = self.hidden(self.conv1(x).mean((2, 3)))
            g = h * 1
            z = self.head(h.tanh())
            g += 1
            return z + g[:, :3]

    return made(Later())


@dropped
def view_that_is_written_later():
    class Later(Net):
        def forward(self, x):
            h = self.hidden(self.conv1(x).mean((2, 3)))
            g = h * 1
            view = g.view(-1)
            z = self.head(h.tanh())
            view.mul_(2)
            return z + g[:, :3]

    return made(Later())


@dropped
def weight_inside_code_that_cannot_be_seen():
    """A kernel of the user's own, say, written in another language."""

    class Kernel(Product):
        @staticmethod
        def forward(ctx, x, w):
            with torch._C.DisableTorchFunction():
                return Product.forward(ctx, x, w)

    class Hidden(Net):
        def forward(self, x):
            h = self.hidden(self.conv1(x).mean((2, 3)))
            z = Kernel.apply(h, self.head.weight).tanh()
            return self.head(Kernel.apply(z, self.head.weight.t()))

    return made(Hidden())


@dropped
def custom_function_that_writes_into_its_input():
    return made(Net(lambda net, h: Doubled.apply(h).tanh()))


@dropped
def custom_function_whose_result_is_written():
    def middle(net, h):
        h = Square.apply(h)
        h.sin_()
        return h

    return made(Net(middle))


@dropped
def view_of_a_custom_functions_result_that_is_written():
    def middle(net, h):
        h = Square.apply(h)
        h.view(-1).sin_()
        return h

    return made(Net(middle))
