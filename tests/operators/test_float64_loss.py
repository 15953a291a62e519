"""Networks that are sure of themselves: the loss is next to nothing, and so are its differences."""

import pytest
import torch
import torch.nn.functional as F
from single import Problem, Settled
from torch import nn

import seht
from seht.operators import losses


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted(model, batch):
    share = torch.linspace(0.5, 1.5, 5).to(batch[0].dtype)
    return F.cross_entropy(input=model(batch[0]), target=batch[1], weight=share)


def binary(model, batch):
    return F.binary_cross_entropy_with_logits(
        model(batch[0]), F.one_hot(batch[1], 5).to(batch[0].dtype)
    )


LOSSES = {f.__name__: f for f in (cross_entropy, weighted, binary)}


def sure(loss_fn):
    """A network that has learnt its batch by heart."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 12), torch.randint(0, 5, (32,))
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5))
    problem = Problem(model, (x, y), loss_fn)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    while problem.closure().item() > 1e-6:
        adam.zero_grad()
        problem.closure().backward()
        adam.step()
    model.zero_grad()
    return problem


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_right(name):
    """With the loss in float32 they were off by 14 to 19 % at the engine's own step."""
    problem = sure(LOSSES[name])
    settled, exact = Settled(problem, {}), problem.double()
    for seed in range(3):
        value, gradient = settled.errors(exact, seed)
        assert gradient < 0.02
        assert value < 0.02


def test_the_loss_keeps_its_type_and_its_gradient():
    problem = sure(cross_entropy)
    model, x, y = problem.model, *problem.batch
    penalty = seht.HessianTrace(model, weight=1e-9, engine="difference")
    loss, z = penalty(lambda: (F.cross_entropy(z := model(x), y), z))
    assert loss.dtype == z.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), problem.closure().detach())
    assert penalty.last.loss == pytest.approx(problem.closure().item(), rel=1e-2)


def test_many_logits_stay_as_they_are(monkeypatch):
    seen = []
    monkeypatch.setattr(losses, "_double", lambda value: seen.append(value) or value)
    model, y = nn.Linear(3, 4), torch.randint(0, 4, (losses.MOST // 4 + 1,))
    x = torch.randn(len(y), 3)
    penalty = seht.HessianTrace(model, weight=1e-3, engine="difference")
    penalty(lambda: F.cross_entropy(model(x), y))
    assert not seen
    penalty(lambda: F.cross_entropy(model(x[1:]), y[1:]))
    assert seen
