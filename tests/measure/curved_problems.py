"""Small problems with a known Hessian, for every measurement."""

import torch
import torch.nn.functional as F
from torch import nn


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def data(count=48, inputs=5, classes=3, dtype=torch.float64, seed=1):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    centres = torch.randn(classes, inputs, generator=draw, dtype=torch.float64)
    x = centres[y] + torch.randn(count, inputs, generator=draw, dtype=torch.float64)
    return x.to(dtype), y


def network(activation=nn.ReLU, dtype=torch.float64, steps=30, seed=0):
    """A small classifier, trained a little, so that the trace is positive."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 3)).double()
    x, y = data()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    model.zero_grad()
    return model.to(dtype)


def exact_hessian(model, batch, loss=loss_fn):
    """Over the weights of two or more dimensions, by plain double backward."""
    weights = [p for p in model.parameters() if p.dim() >= 2]
    gradient = torch.autograd.grad(loss(model, batch), weights, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    rows = []
    for entry in flat:
        row = torch.autograd.grad(entry, weights, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([r.flatten() for r in row]))
    return torch.stack(rows).detach()
