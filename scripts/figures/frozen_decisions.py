"""docs/images/frozen-decisions.svg: what a plain difference sees of a ReLU network, and ours."""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from plots import OURS, PLAIN, save
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 3)).double()
x, y = torch.randn(400, 4).double(), torch.randint(0, 3, (400,))
weights = [model[0].weight, model[2].weight]
centre = [w.detach().clone() for w in weights]
signs = [torch.sign(torch.randn_like(w)) for w in weights]
with torch.no_grad():
    mask = (model[0](x) > 0).double()


def loss(frozen):
    hidden = model[0](x)
    return F.cross_entropy(model[2](hidden * mask if frozen else hidden.relu()), y)


def gradient(e, frozen):
    with torch.no_grad():
        for w, c, s in zip(weights, centre, signs, strict=True):
            w.copy_(c + e * s)
    found = torch.autograd.grad(loss(frozen), weights)
    return torch.cat([g.flatten() for g in found])


flat = torch.cat([s.flatten() for s in signs])


def second(e, frozen):
    """The gradient of the trace, by differences with step e."""
    sides = gradient(e, frozen) + gradient(-e, frozen) - 2 * gradient(0.0, frozen)
    return sides / e**2


def nested():
    gradient(0.0, False)  # back to the centre
    first = torch.autograd.grad(loss(False), weights, create_graph=True)
    along = sum((g * s).sum() for g, s in zip(first, signs, strict=True))
    hessian = torch.autograd.grad(along, weights, create_graph=True)
    trace = sum((h * s).sum() for h, s in zip(hessian, signs, strict=True))
    return torch.cat([g.flatten() for g in torch.autograd.grad(trace, weights)])


truth = nested()
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
steps = torch.linspace(-0.25, 0.25, 801).tolist()
for frozen, colour, name in (
    (False, PLAIN, "the network itself"),
    (True, OURS, "decisions frozen"),
):
    along = [float(gradient(e, frozen) @ flat) for e in steps]
    left.plot(steps, along, color=colour, label=name, lw=1.8 if frozen else 1.2)
left.axvline(0, color="#ced4da", lw=0.8, zorder=0)
left.set(title="slope of the loss along a probe", xlabel="step e", ylabel="s · g(w + e s)")
left.legend()

sizes = torch.logspace(-4, -0.6, 35).tolist()
for frozen, colour, name in ((False, PLAIN, "plain difference"), (True, OURS, "decisions frozen")):
    errors = [float((second(e, frozen) - truth).norm() / truth.norm()) for e in sizes]
    right.loglog(sizes, errors, color=colour, label=name, marker="o", ms=2.5, lw=1)
right.axhline(1, color="#ced4da", lw=0.8, zorder=0)
right.set(title="relative error of the trace's gradient", xlabel="step e")
right.legend()
save(figure, "frozen-decisions.svg")
