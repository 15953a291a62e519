"""Models for the tests of seht.check: right ones, kinked ones, and ones that break an engine."""

import torch
import torch.nn.functional as F
from torch import nn


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def images(count=6, channels=3, size=8, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, channels, size, size, generator=generator)
    return x, torch.arange(count) % classes


def flat(*layers):
    """A small classifier of 3 x 8 x 8 images around these layers of 8 features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), *layers, nn.Linear(8, 4))


class Residual(nn.Module):
    def __init__(self, channels, activation):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
            activation(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.activation = activation()

    def forward(self, x):
        return self.activation(self.body(x) + x)


def resnet(activation=nn.ReLU, blocks=2):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), activation(),
        *(Residual(6, activation) for _ in range(blocks)),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 4),
    )  # fmt: skip


class StraightThrough(nn.Module):
    def forward(self, x):
        return x + (x.round() - x).detach()


class Handmade(nn.Module):
    """A ReLU made of a comparison, a running maximum under no_grad, and a branch on values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("top", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.top = torch.maximum(self.top, x.abs().max())
        y = torch.where(x > 0, x, 0.1 * x) / self.top
        return y * 2 if y.sum() > 0 else y * 3


# --- right at order 1, wrong above ---------------------------------------------------------------


class WrongTanh(torch.autograd.Function):
    """Right at order 1; the saved output is a constant to its own backward, as in fused norms."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = x.tanh()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.y**2)


class OnceSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class Wrong(nn.Module):
    def __init__(self, function=WrongTanh):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class WrongBlock(nn.Module):
    """The damage is done between its children, which are all right."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + WrongTanh.apply(self.norm(self.linear(x)))
