"""The tape: at other weights every decision is as it was; everything else is the model's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seht.check.tape import NotRepeatable, Tape

X = torch.linspace(-2, 2, 24, dtype=torch.float64).sin().mul(3).reshape(2, 3, 4)
TOWARDS = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64).repeat(8).reshape(X.shape)
SHIFT = 0.7


def at(function, shift, tape=None):
    x = (X + shift * TOWARDS).requires_grad_()
    if tape is None:
        y = function(x.clone())
    else:
        with tape:
            y = function(x.clone())
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)
    return y.detach(), torch.zeros_like(x) if slope is None else slope


KINKED = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu_": torch.relu_,
    "method": lambda x: x.relu(),
    "module": nn.ReLU(inplace=True),
    "relu6": F.relu6,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.3, 1.5),
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "clamp_": lambda x: x.clamp_(min=0.1),
    "abs": torch.abs,
    "round": torch.round,
    "sign": lambda x: x.sign() * x,
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, stride=1, padding=1),
    "MaxPool2d": nn.MaxPool2d(2),
    "adaptive": lambda x: F.adaptive_max_pool1d(x, 2),
    "where": lambda x: torch.where(x > 0, x * x, -x),
    "bool": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "item": lambda x: x * x.max().item(),
    "index": lambda x: x.flatten()[x.flatten().argmax()] * x,
    "mask": lambda x: x[x > 0.5].square(),
}


@pytest.mark.parametrize("name", KINKED)
def test_pieces_are_those_of_the_first_pass(name):
    """Frozen, every function here is a polynomial of degree 2 or less: three values give all."""
    function, tape = KINKED[name], Tape()
    plain, first = at(function, 0.0), at(function, 0.0, tape)
    for a, b in zip(plain, first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    values = {k: at(function, k * SHIFT, tape)[0] for k in (-1, 0, 1, 2)}
    third = values[2] - 3 * values[1] + 3 * values[0] - values[-1]
    assert third.abs().max() < 1e-9
    tiny = {k: at(function, k * 1e-6, tape)[0] for k in (-1, 1)}
    slope = (tiny[1] - tiny[-1]).sum() / 2e-6
    assert slope.item() == pytest.approx((first[1] * TOWARDS).sum().item(), abs=1e-6)


@pytest.mark.parametrize("name", [n for n in KINKED if n != "bool"])
def test_those_cases_would_be_kinked_without_the_tape(name):
    values = {k: at(KINKED[name], k * SHIFT)[0] for k in (-1, 0, 1, 2)}
    if len({v.shape for v in values.values()}) == 1:
        third = values[2] - 3 * values[1] + 3 * values[0] - values[-1]
        assert third.abs().max() > 1e-3


CONSTANT = {
    "detach": lambda x: x * x.detach(),
    "data": lambda x: x * x.data,
    "no_grad": lambda x: x * held(x),
    "no_grad decorator": lambda x: x * decorated(x),
    "no_grad in place": lambda x: x * written(x),
}


def held(x):
    with torch.no_grad():
        return x.exp() + 1


@torch.no_grad()
def decorated(x):
    return x.max(dim=-1, keepdim=True).values


def written(x):
    with torch.no_grad():
        return torch.ones_like(x).mul_(x).add_(1)


@pytest.mark.parametrize("name", CONSTANT)
def test_what_autograd_holds_constant_is_held(name):
    tape = Tape()
    centre, slope = at(CONSTANT[name], 0.0, tape)
    moved, same = at(CONSTANT[name], SHIFT, tape)
    torch.testing.assert_close(same, slope)
    torch.testing.assert_close(moved, centre + SHIFT * TOWARDS * slope)


def test_custom_functions_are_not_touched_inside():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.detach().clamp(min=-100) * x.data

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 * ctx.saved_tensors[0]

    tape = Tape()
    at(Square.apply, 0.0, tape)
    torch.testing.assert_close(at(Square.apply, SHIFT, tape)[0], (X + SHIFT * TOWARDS) ** 2)


def test_buffers_written_in_place_are_still_written():
    norm = nn.BatchNorm1d(3, momentum=None).double()
    tape = Tape()
    for count in (1, 2):
        with tape:
            norm(X)
        assert norm.num_batches_tracked == count


def test_another_sequence_of_decisions_is_refused():
    def run(functions):
        with tape:
            x = X.clone().requires_grad_()
            for function in functions:
                x = function(x)

    for first, second in (
        ([F.relu], [torch.abs]),
        ([F.relu], [F.relu, F.relu]),
        ([F.relu, F.relu], [F.relu]),
    ):
        tape = Tape()
        run(first)
        run(first)
        with pytest.raises(NotRepeatable):
            run(second)
