"""What a closure does with the model: written once, run with the user's forms or the plain ones.

A closure sees the model, its input and a loss of the outputs, all three in one form or the other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]
Body = Callable[[Model, Tensor, Callable[[Tensor], Tensor], list[Tensor]], Tensor]


class Closure(NamedTuple):
    body: Body
    inner: bool = False
    """Whether it takes a gradient inside."""
    apart: bool = True
    """Whether it keeps examples apart."""
    needs_floats: bool = False


def slope(z: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(z.sum(), x, create_graph=True)[0]


def r1(model, x, loss, weights):
    x = x.detach().clone().requires_grad_()
    z = model(x)
    return loss(z) + 0.5 * slope(z, x).square().sum() / x.shape[0]


def gradient_penalty(model, x, loss, weights):
    x = (0.7 * x.detach()).requires_grad_()
    z = model(x)
    length = (slope(z, x).flatten(1).square().sum(1) + 1e-2).sqrt()
    return loss(z) + (length - 1).square().sum() / x.shape[0]


def pinn(model, x, loss, weights):
    x = x.detach().clone().requires_grad_()
    z = model(x)
    bend = slope(slope(z, x).square(), x)
    return loss(z) + 0.1 * bend.square().sum() / x.shape[0]


def other_input(model, x, loss, weights):
    """An inner gradient at a second point, through a second call."""
    own = (x + 0.1).detach().requires_grad_()
    return loss(model(x)) + slope(model(own), own).square().sum() / x.shape[0]


def leaf(model, x, loss, weights):
    return loss(model(x.detach().clone().requires_grad_()))


def gradient_norm(model, x, loss, weights):
    value = loss(model(x))
    slopes = torch.autograd.grad(value, weights, create_graph=True, allow_unused=True)
    return value + 0.05 * sum(g.square().sum() for g in slopes if g is not None)


def decay(model, x, loss, weights):
    return loss(model(x)) + 0.1 * sum(w.pow(2).sum() for w in weights)


def lasso(model, x, loss, weights):
    return loss(model(x)) + 0.1 * sum(w.abs().sum() for w in weights)


def moved(x: Tensor) -> Tensor:
    return x.flip(1) if not x.is_floating_point() else 0.5 * x + 0.1


def consistency(model, x, loss, weights):
    one, two = model(x), model(moved(x))
    return loss(one) + 0.5 * (one - two).square().sum() / x.shape[0]


def teacher(model, x, loss, weights):
    with torch.no_grad():
        target = model(moved(x))
    z = model(x)
    return loss(z) + 0.5 * (z - target).square().sum() / x.shape[0]


def stopped(model, x, loss, weights):
    z = model(x)
    return loss(z) + 0.5 * (z - model(moved(x)).detach()).square().sum() / x.shape[0]


def contrast(model, x, loss, weights):
    z = model(x)
    return loss(z) + 0.1 * (z @ z.t()).square().sum() / x.shape[0] ** 2


def scaled(model, x, loss, weights):
    """Divided by its own detached value."""
    value = loss(model(x))
    return value / (0.5 + value.detach().abs())


def branch(model, x, loss, weights):
    """A decision in Python."""
    value = loss(model(x))
    return 2 * value if value.item() > 0.9 else value


CLOSURES: dict[str, Closure] = {
    "plain": Closure(lambda model, x, loss, weights: loss(model(x))),
    "leaf": Closure(leaf, needs_floats=True),
    "r1": Closure(r1, inner=True, needs_floats=True),
    "gradient-penalty": Closure(gradient_penalty, inner=True, needs_floats=True),
    "pinn": Closure(pinn, inner=True, needs_floats=True),
    "other-input": Closure(other_input, inner=True, needs_floats=True),
    "gradient-norm": Closure(gradient_norm, inner=True, apart=False),
    "decay": Closure(decay, apart=False),
    "lasso": Closure(lasso, apart=False),
    "consistency": Closure(consistency),
    "teacher": Closure(teacher),
    "stopped": Closure(stopped),
    "contrast": Closure(contrast, apart=False),
    "scaled": Closure(scaled, apart=False),
    "branch": Closure(branch, apart=False),
}


# --- what happens between the model and the loss, where examples may meet ------------------------


def propagation(n: int) -> Tensor:
    """A graph's normalised neighbourhood."""
    near = torch.eye(n, dtype=torch.float64) + torch.eye(n, dtype=torch.float64).roll(1, 1)
    return near / 2


class Mix(NamedTuple):
    user: Model
    plain: Model


def running(z: Tensor) -> Tensor:
    return torch.stack([z[: i + 1].sum(0) for i in range(z.shape[0])])


MIXES: dict[str, Mix | None] = {
    "none": None,
    "matmul": Mix(lambda z: propagation(len(z)) @ z, lambda z: propagation(len(z)) @ z),
    "mm": Mix(lambda z: torch.mm(propagation(len(z)), z), lambda z: propagation(len(z)) @ z),
    "einsum": Mix(
        lambda z: torch.einsum("nm,mk->nk", propagation(len(z)), z),
        lambda z: propagation(len(z)) @ z,
    ),
    "sparse": Mix(
        lambda z: torch.sparse.mm(propagation(len(z)).to_sparse(), z),
        lambda z: propagation(len(z)) @ z,
    ),
    "cumsum": Mix(lambda z: z.cumsum(0), running),
    "index-add": Mix(
        lambda z: z.index_add(0, torch.tensor([0]), z[1:2]),
        lambda z: torch.cat([z[:1] + z[1:2], z[1:]]),
    ),
    "centred": Mix(lambda z: z - z.mean(0), lambda z: z - z.sum(0) / len(z)),
    "rolled": Mix(lambda z: z + z.roll(1, 0), lambda z: z + torch.cat([z[-1:], z[:-1]])),
    "flipped": Mix(lambda z: z.flip(0), lambda z: z.flip(0)),
}
