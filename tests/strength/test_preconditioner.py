"""Inner products as the optimiser sees them: against the step that it takes."""

import copy

import pytest
import torch
from torch import nn

from seht.strength.products import Preconditioner, mean, trainable, vector


def stepped(make, rates=(0.1, 0.01)):
    """A model after some steps, two groups with rates of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    parts = zip(model[::2], rates, strict=True)
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in parts]
    optimizer = make(groups)
    x = torch.randn(16, 4).double()
    for _ in range(200):
        optimizer.zero_grad()
        (model(x + torch.randn_like(x)) ** 2).mean().backward()
        optimizer.step()
    return model, optimizer


OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "Adam": lambda groups: torch.optim.Adam(groups, betas=(0.0, 0.9)),
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.0, 0.9), weight_decay=0.0),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups),
    "AMSGrad": lambda groups: torch.optim.Adam(groups, betas=(0.0, 0.9), amsgrad=True),
    "Adamax": lambda groups: torch.optim.Adamax(groups, betas=(0.0, 0.9)),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "RMSprop, centred": lambda groups: torch.optim.RMSprop(groups, centered=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, betas=(0.0, 0.9)),
    "RAdam": lambda groups: torch.optim.RAdam(groups, betas=(0.0, 0.9)),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups),
    "Adafactor, Hugging Face's": lambda groups: adafactor(groups, scale_parameter=False),
    "Adafactor, Hugging Face's, scaled": lambda groups: adafactor(groups, scale_parameter=True),
}


def adafactor(groups, **options):
    found = pytest.importorskip("transformers.optimization")
    return found.Adafactor(groups, relative_step=False, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_product_is_what_a_step_changes(name):
    """A step along g changes a loss with the gradient u by -(u, g), up to one common factor. A tiny
    g leaves the optimiser's squares as they are.
    """
    rates = (0.05, 0.005) if "Adafactor" in name else (0.1, 0.01)  # it bounds larger ones
    model, optimizer = stepped(OPTIMIZERS[name], rates)
    weights = trainable(model)
    metric = Preconditioner(optimizer)
    torch.manual_seed(1)
    ratios = []
    for _ in range(4):
        g = {n: 1e-6 * torch.randn_like(p) for n, p in weights.items()}
        u = {n: torch.randn_like(p) for n, p in weights.items()}
        state = {n: p.detach().clone() for n, p in weights.items()}
        squares = copy.deepcopy(optimizer.state_dict())
        for n, p in weights.items():
            p.grad = g[n]
        optimizer.step()
        change = sum(float((u[n] * (p.detach() - state[n])).sum()) for n, p in weights.items())
        ratios.append(-change / float(metric.inner(u, g, weights).sum()))
        with torch.no_grad():
            for n, p in weights.items():
                p.copy_(state[n])
        optimizer.load_state_dict(squares)
    assert ratios == pytest.approx([ratios[0]] * 4, rel=1e-3) and ratios[0] > 0


def test_what_the_optimiser_does_not_hold_does_not_move():
    """A part that another optimiser trains, or none, is left out; an optimiser of another model
    says nothing.
    """
    model, _ = stepped(OPTIMIZERS["SGD"])
    weights = trainable(model)
    ones = {n: torch.ones_like(p) for n, p in weights.items()}
    of_head = Preconditioner(torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert of_head.inner(ones, ones, weights).tolist() == [0.0, 0.0, 10.0, 2.0]
    of_other = Preconditioner(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert of_other.inner(ones, ones, weights).tolist() == [20.0, 5.0, 10.0, 2.0]


def test_without_an_optimiser_it_is_the_plain_one():
    a, b = torch.randn(3, 2), torch.randn(3, 2)
    weights = {"w": nn.Parameter(a), "other": nn.Parameter(b)}
    found = Preconditioner(None).inner({"w": a}, {"w": b, "other": a}, weights)
    assert found.tolist() == pytest.approx([float((a * b).sum()), 0.0], rel=1e-6)


def test_rates_that_are_all_zero_say_nothing():
    """The first step of a warm-up."""
    model, optimizer = stepped(OPTIMIZERS["SGD"], rates=(0.0, 0.0))
    g = vector(list(trainable(model)), [torch.ones_like(p) for p in model.parameters()])
    assert Preconditioner(optimizer).inner(g, g, trainable(model)).sum() == 5 * 4 + 5 + 2 * 5 + 2


def test_a_rate_that_the_optimiser_finds_itself():
    """Adafactor's ``lr=None``; and nothing is known before its first step."""
    found = pytest.importorskip("transformers.optimization")
    model = nn.Linear(3, 2)
    g = vector(list(trainable(model)), [torch.ones_like(p) for p in model.parameters()])
    metric = Preconditioner(found.Adafactor(model.parameters()))
    assert metric.inner(g, g, trainable(model)).tolist() == [6.0, 2.0]


def test_a_mean_has_what_any_step_had():
    first, second = {"a": torch.ones(2)}, {"b": torch.ones(2)}
    found = mean(mean({}, first, 1.0), second, 0.5)
    assert found["a"].tolist() == found["b"].tolist() == [0.5, 0.5]
    assert first["a"].tolist() == [1.0, 1.0]
