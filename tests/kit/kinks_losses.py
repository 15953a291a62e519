"""Losses with kinks, in every reduction."""

import torch
import torch.nn.functional as F
from kinked import ROW, add
from torch import Tensor

# Near the values of z, so that both sides of every kink are met.
TARGET = torch.linspace(-1, 30, ROW[0] * ROW[1]).double().view(ROW).cos()
SIGNS = torch.arange(ROW[0] * ROW[1]).view(ROW) % 2 * 2.0 - 1
LABELS = torch.tensor([3, 0, 4, 1, 2, 0]).repeat(8)
WEIGHTS = torch.linspace(0.5, 2, 5).double()


def multi_margin(
    z: Tensor, p: int = 1, weight: Tensor | None = None, labels: Tensor = LABELS
) -> Tensor:
    """The definition, one example and one class at a time."""
    losses = []
    for x, y in zip(z, labels.tolist(), strict=True):
        wrong = [1 - x[y] + x[i] for i in range(5) if i != y]
        hinges = torch.stack([term * (term > 0) for term in wrong]) ** p
        losses.append(hinges.sum() / 5 * (1 if weight is None else weight[y]))
    return torch.stack(losses)


RIGHT = torch.tensor([[3, 0, -1, 4, 4], [1, -1, 1, 1, 1], [2, 2, 4, -1, 0]]).repeat(16, 1)


def multilabel_margin(z: Tensor) -> Tensor:
    """The same for several right classes: those before the first -1."""
    losses = []
    for x, labels in zip(z, RIGHT.tolist(), strict=True):
        labels = labels[: labels.index(-1)]
        terms = [1 - x[y] + x[i] for y in labels for i in range(5) if i not in labels]
        losses.append(torch.stack([term * (term > 0) for term in terms]).sum() / 5)
    return torch.stack(losses)


def largest(d: Tensor) -> Tensor:
    """The largest |d| of each row, by its place."""
    at = d.detach().abs().argmax(-1, keepdim=True)
    return (d * d.detach().sign()).gather(-1, at).squeeze(-1)


def triplet(z: Tensor, **options) -> Tensor:
    return F.triplet_margin_loss(*z.view(-1, 3, 4).unbind(1), **options)


def distance(z: Tensor, **options) -> Tensor:
    return F.triplet_margin_with_distance_loss(*z.view(-1, 3, 4).unbind(1), **options)


def cosine(z: Tensor, **options) -> Tensor:
    a, b = (z + 1.5).view(-1, 2, 4).unbind(1)
    return F.cosine_embedding_loss(a, b, SIGNS.flatten()[: len(a)], margin=0.85, **options)


for reduction in ("mean", "sum", "none"):
    how = {"reduction": reduction}
    # A sum of many terms would wind the sine of the harness too far.
    scale = 0.02 if reduction == "sum" else 1.0
    tail = {"mean": torch.mean, "sum": torch.sum, "none": lambda losses: losses}[reduction]
    losses = {
        "l1": lambda z, how=how: F.l1_loss(z, TARGET, **how),
        "smooth_l1": lambda z, how=how: F.smooth_l1_loss(z, TARGET, beta=0.7, **how),
        "smooth_l1-0": lambda z, how=how: F.smooth_l1_loss(z, TARGET, beta=0.0, **how),
        "huber": lambda z, how=how: F.huber_loss(z, TARGET, delta=0.7, **how),
        "huber-weight": lambda z, how=how: F.huber_loss(z, TARGET, weight=TARGET.exp(), **how),
        "hinge_embedding": lambda z, how=how: F.hinge_embedding_loss(z, SIGNS, 0.5, **how),
        "margin_ranking": lambda z, how=how: F.margin_ranking_loss(z, TARGET, SIGNS, 0.2, **how),
        "multi_margin": (
            lambda z, how=how: F.multi_margin_loss(z.view(-1, 5), LABELS, **how),
            lambda z, tail=tail: tail(multi_margin(z.view(-1, 5))),
        ),
        "multi_margin-2": (
            lambda z, how=how: F.multi_margin_loss(z.view(-1, 5), LABELS, 2, weight=WEIGHTS, **how),
            lambda z, tail=tail: tail(multi_margin(z.view(-1, 5), 2, WEIGHTS)),
        ),
        "multilabel_margin": (
            lambda z, how=how: F.multilabel_margin_loss(z.view(-1, 5), RIGHT, **how),
            lambda z, tail=tail: tail(multilabel_margin(z.view(-1, 5))),
        ),
        "triplet_margin": lambda z, how=how: triplet(z, margin=0.2, **how),
        "triplet_margin-swap": lambda z, how=how: triplet(z, swap=True, p=3, **how),
        "triplet_margin-1": lambda z, how=how: triplet(z, p=1.0, **how),
        "triplet_distance": lambda z, how=how: distance(z, swap=True, **how),
        "cosine_embedding": lambda z, how=how: cosine(z, **how),
        "gaussian_nll": lambda z, how=how: F.gaussian_nll_loss(
            z, TARGET, z.flip(0).square(), eps=1.5, **how
        ),
    }
    for name, loss in losses.items():
        pair = loss if isinstance(loss, tuple) else (loss,)
        scaled = tuple(lambda z, f=f, scale=scale: scale * f(z) for f in pair)
        # A squared hinge has no kink to speak of.
        add(
            {f"{name}-{reduction}": scaled if len(scaled) == 2 else scaled[0]},
            crosses=name != "multi_margin-2",
        )

# The arguments of old, and one example without a batch.
add(
    {
        "l1-size_average": lambda z: F.l1_loss(z, TARGET, size_average=True),
        "smooth_l1-reduce": lambda z: F.smooth_l1_loss(z, TARGET, reduce=False),
        "multi_margin-one": (
            lambda z: torch.stack([F.multi_margin_loss(x, LABELS[0]) for x in z.view(-1, 5)]),
            lambda z: multi_margin(z.view(-1, 5), labels=LABELS[:1].repeat(48)),
        ),
    }
)

# Distances between all rows.
FIRST, SECOND = torch.triu_indices(6, 6, 1)
sizes = lambda d: (d * d.detach().sign()).sum(-1)
add(
    {
        "cdist-1": (
            lambda z: 0.1 * torch.cdist(z, TARGET, p=1.0),
            lambda z: 0.1 * sizes(z[:, None] - TARGET),
        ),
        "cdist-inf": (
            lambda z: torch.cdist(z, TARGET[:4], torch.inf),
            lambda z: largest(z[:, None] - TARGET[:4]),
        ),
        "pdist-1": (
            lambda z: 0.1 * torch.pdist(z, 1.0),
            lambda z: 0.1 * sizes(z[FIRST] - z[SECOND]),
        ),
    }
)
