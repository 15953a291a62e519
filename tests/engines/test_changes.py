"""A training that changes on the way: what was learnt of one loss or set of weights is not used for
another.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht

X, Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))


LATER = {
    "flat": (lambda z: F.l1_loss(z, torch.ones_like(z)), "no curvature"),
    "norm": (lambda z: F.cross_entropy(F.layer_norm(z, (4,)), Y), "between the network's outputs"),
}


@pytest.mark.parametrize(
    "engine, later", [("difference", n) for n in LATER] + [("autograd", "flat")]
)
def test_another_loss_is_looked_at(engine, later):
    model = network()
    penalty = seht.HessianTrace(model, weight=0.1, seed=4, curvature="ggn", engine=engine)
    penalty(lambda: F.cross_entropy(model(X), Y)).backward()
    penalty(lambda: F.mse_loss(model(X), X[:, :4])).backward()  # one that is looked at itself
    loss, said = LATER[later]
    for _ in range(2):  # and refused every time
        with pytest.raises(RuntimeError, match=said):
            penalty(lambda: loss(model(X)))
    assert penalty.step == 2


class Casting(nn.Module):
    """In the middle in bfloat16, once it is told so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.low = False

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.low:
            return self.c(torch.tanh((h.bfloat16() @ self.b.weight.bfloat16().T).to(h.dtype)))
        return self.c(torch.tanh(self.b(h)))


def test_casts_that_begin_later():
    """At float32's step the penalty's gradient was off by a factor of 30 for hundreds of steps."""
    model = Casting()
    penalty = seht.HessianTrace(model, weight=1.0, seed=4)
    sizes = []
    for step in range(8):
        model.low = step >= 4
        penalty(lambda: F.cross_entropy(model(X), Y)).backward()
        sizes.append(model.a.weight.grad.norm())
        model.zero_grad()
    assert max(sizes[4:]) < 5 * max(sizes[:4])
    assert penalty.state_dict()["engine"]["kappa"] > 0.03


class Uneven(nn.Module):
    """Weights of very different sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 4)
        for layer, size in ((self.e, 3.0), (self.a, 4.0), (self.c, 0.05)):
            layer.weight.data.mul_(size)

    def forward(self, words):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(self.e(words).mean(1))))))


def test_weights_that_are_unfrozen():
    """The step of a head is not that of the whole network."""
    words = torch.randint(0, 20, (8, 3), generator=torch.Generator().manual_seed(0))
    model = Uneven()

    def closure():
        return F.cross_entropy(model(words), Y)

    def gradient(penalty):
        model.zero_grad()
        (penalty(closure) - F.cross_entropy(model(words), Y)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    penalty = seht.HessianTrace(model, weight=1.0, seed=3)
    for part in (model.e, model.a):
        part.requires_grad_(False)
    for _ in range(40):
        penalty(closure)
    for part in (model.e, model.a):
        part.requires_grad_(True)
    found = gradient(penalty)
    exact = seht.hessian_trace(model, closure, engine="autograd", seed=penalty.last.seed)
    truth = torch.autograd.grad(exact, list(model.parameters()))
    truth = torch.cat([g.flatten() for g in truth])
    assert (found - truth).norm() < 0.05 * truth.norm()
