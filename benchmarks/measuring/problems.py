"""Trained networks on real data: a ResNet-18 on CIFAR-10, a small transformer on WikiText-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.lab.config import DataConfig
from seht.lab.models import GPT, resnet18

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """How much training, and how much to measure on."""

    train: int
    """Examples of one epoch."""
    epochs: int
    samples: int
    batch: int = 128


@dataclass(frozen=True)
class Trained:
    """A network in evaluation mode, and batches of equal size."""

    title: str
    model: nn.Module
    batches: list[Pair]
    loss: float


def criterion(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over every prediction."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
    """The mean loss of a batch."""
    return criterion(model(batch[0]), batch[1])


class Sentences(nn.Module):
    """A language model on ``(examples, time)``, as the other packages count examples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(examples, time, vocabulary)``."""
        return self.inner(tokens.t())[0].transpose(0, 1)


def images(size: Size, data_dir: str | None) -> tuple[nn.Module, Pair, Pair]:
    """Network, training data, data to measure on (of the training images, as the loss is)."""
    from seht.lab.data.images import pictures

    all_of_it = pictures("cifar10", data_dir)
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(all_of_it.x), generator=draw)[: max(size.train, size.samples)]
    mean = torch.tensor(all_of_it.mean).view(-1, 1, 1)
    std = torch.tensor(all_of_it.std).view(-1, 1, 1)
    x = (all_of_it.x[order].float() / all_of_it.white - mean) / std
    y = all_of_it.y[order]
    seen = slice(0, size.samples)
    return resnet18(width=16), (x[: size.train], y[: size.train]), (x[seen], y[seen])


def text(size: Size, data_dir: str | None, length: int = 32) -> tuple[nn.Module, Pair, Pair]:
    """The same for text: an example is a stretch of 32 words."""
    from seht.lab.data.text import corpus

    words = corpus(DataConfig("wikitext2", vocabulary=1000), data_dir)
    tokens = words.tokens["train"]
    count = min(max(size.train, size.samples), (len(tokens) - 1) // length)
    x = tokens[: count * length].view(count, length)
    y = tokens[1 : count * length + 1].view(count, length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    gpt = GPT(vocabulary=len(words.words), context=length, width=64, layers=2, heads=4)
    seen = slice(0, size.samples)
    return Sentences(gpt), (x[: size.train], y[: size.train]), (x[seen], y[seen])


PROBLEMS: dict[str, tuple[str, Callable[..., tuple[nn.Module, Pair, Pair]]]] = {
    "resnet18": ("ResNet-18, width 16, CIFAR-10", images),
    "gpt": ("GPT, 2 blocks, width 64, WikiText-2", text),
}


def trained(name: str, size: Size, data_dir: str | None, say: Callable[[str], None]) -> Trained:
    """Train with Adam and a cosine, then evaluation mode; only the probed weights train after."""
    title, make = PROBLEMS[name]
    torch.manual_seed(0)
    model, (x, y), seen = make(size, data_dir)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = size.epochs * (len(x) // size.batch)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, steps))
    model.train()
    for epoch in range(size.epochs):
        for part in torch.randperm(len(x)).split(size.batch)[: len(x) // size.batch]:
            adam.zero_grad()
            loss = loss_fn(model, (x[part], y[part]))
            loss.backward()
            adam.step()
            cosine.step()
        say(f"{name}: epoch {epoch + 1} of {size.epochs}, loss {loss.item():.3f}")
    model.eval()
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():  # PyHessian takes all that train; we these
        parameter.requires_grad_(parameter.dim() >= 2)
    batches = list(zip(seen[0].split(size.batch), seen[1].split(size.batch), strict=True))
    with torch.no_grad():
        found = sum(loss_fn(model, batch).item() for batch in batches) / len(batches)
    return Trained(title, model, batches, found)
