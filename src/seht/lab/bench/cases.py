"""The networks of the benchmark, each with a batch of made-up data that can be learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.lab import models

Batch = tuple[Tensor, Tensor]


@dataclass
class Problem:
    """A model on one batch: what a row is run on."""

    model: nn.Module
    x: Tensor
    y: Tensor
    axis: int
    """Where the examples lie: 0 for images, 1 for text of shape (time, batch)."""
    adamw: bool = False

    def optimizer(self) -> torch.optim.Optimizer:
        """One that leaves the weights where they are: SGD with momentum, or AdamW."""
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if self.adamw:
            return torch.optim.AdamW(weights, lr=0.0)
        return torch.optim.SGD(weights, lr=0.0, momentum=0.9)

    def logits(self, x: Tensor) -> Tensor:
        """The model's predictions, one row for each target."""
        z = self.model(x)
        z = z[0] if isinstance(z, tuple) else z  # language models return their state too
        return z.flatten(0, -2)

    def closure(self) -> Tensor:
        """The loss of the batch."""
        return F.cross_entropy(self.logits(self.x), self.y.flatten())

    def quarter(self, seed: int) -> Callable[[], Tensor]:
        """The loss of a random quarter of the batch."""
        count = self.x.shape[self.axis]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        chosen = order[: max(1, count // 4)]
        x, y = self.x.index_select(self.axis, chosen), self.y.index_select(self.axis, chosen)
        return lambda: F.cross_entropy(self.logits(x), y.flatten())

    def double(self) -> Problem:
        """A copy in float64."""
        x = self.x.double() if self.x.is_floating_point() else self.x
        return replace(self, model=copy.deepcopy(self.model).double(), x=x)


# --- data -------------------------------------------------------------------------------------


def images(count: int, draw: torch.Generator, *, channels: int, size: int) -> Batch:
    """A smooth pattern for each class, under noise: real examples share structure, too."""
    fixed = torch.Generator().manual_seed(0)
    patterns = F.interpolate(
        torch.randn(10, channels, 4, 4, generator=fixed), size=(size, size), mode="bilinear"
    )
    y = torch.randint(10, (count,), generator=draw)
    return patterns[y] + torch.randn(count, channels, size, size, generator=draw), y


def text(count: int, draw: torch.Generator, *, vocabulary: int, length: int) -> Batch:
    """Half of the words follow from the one before, the others are drawn, frequent ones first."""
    rare = torch.rand(length + 1, count, generator=draw)
    tokens = (vocabulary * rare**3).long().clamp(max=vocabulary - 1)
    follows = torch.rand(length + 1, count, generator=draw) < 0.5
    for t in range(1, length + 1):
        tokens[t] = torch.where(follows[t], (7 * tokens[t - 1] + 3) % vocabulary, tokens[t])
    return tokens[:-1], tokens[1:]


# --- cases ------------------------------------------------------------------------------------

Sizes = dict[str, Any]
SCALES = ("full", "medium", "small", "mini", "tiny")


@dataclass(frozen=True)
class Case:
    """A network in several sizes."""

    title: str
    build: Callable[..., nn.Module]
    """Takes the sizes that are the model's."""
    data: Callable[..., Batch]
    """Takes batch, generator and the sizes that are the data's."""
    axis: int
    sizes: dict[str, tuple[Sizes, Sizes, int]]
    """By scale: the model's sizes, the data's, the batch."""
    compiled: bool = False
    """Whether the benchmark also runs it under ``torch.compile``."""
    rows: frozenset[str] | None = None
    """The rows it is there for; None: all."""
    adamw: bool = False
    """Whether it is trained by AdamW, which has two numbers for each weight."""
    seconds: tuple[float, float] = (60.0, 10.0)
    """For its timing: of a whole benchmark, and of a fast one."""

    def describe(self, scale: str) -> str:
        """The sizes in words."""
        model, data, batch = self.sizes[scale]
        parts = [f"{name} {value}" for name, value in {**model, **data}.items()]
        return ", ".join([*parts, f"batch {batch}"])

    def problem(self, scale: str, *, train: int = 0, dropout: bool = True) -> Problem:
        """The model of that size on a batch, after ``train`` steps on other batches."""
        options, data, batch = self.sizes[scale]
        torch.manual_seed(0)
        model = self.build(**options).train()
        draw = torch.Generator().manual_seed(1)
        if not dropout:
            _no_dropout(model)
        problem = Problem(model, *self.data(batch, draw, **data), self.axis, self.adamw)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(train):
            x, y = self.data(batch, draw, **data)
            other = replace(problem, x=x, y=y)
            adam.zero_grad()
            other.closure().backward()
            adam.step()
        model.zero_grad()
        return problem


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def _scaled(batch: Sequence[int], **sizes: Sequence[int | None]) -> dict[str, Any]:
    """The model's sizes and the batch at each scale; ``None`` leaves a size at its default."""
    rows = [
        {name: value for name, value in zip(sizes, row, strict=True) if value is not None}
        for row in zip(*sizes.values(), strict=True)
    ]
    return {k: (row, {}, count) for k, row, count in zip(SCALES, rows, batch, strict=True)}


def _lm(words: int, length: int, batch: int, **model: Any) -> tuple[Sizes, Sizes, int]:
    return {"vocabulary": words, **model}, {"vocabulary": words, "length": length}, batch


class _Adapter(nn.Module):
    """LoRA on a linear layer: the layer stays as it is, and a map of low rank is learnt beside."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Both together."""
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def _adapted(**sizes: Any) -> nn.Module:
    model = models.GPT(**sizes).requires_grad_(False)
    block: Any
    for block in model.blocks:
        block.qkv = _Adapter(block.qkv, rank=8)
    return model


_COLOURED = partial(images, channels=3, size=32)
_LARGE = Case(
    "small GPT with the vocabulary of GPT-2",
    models.GPT,
    text,
    1,
    {
        "full": _lm(50257, 256, 4, context=256, width=256, layers=4),
        "medium": _lm(1000, 64, 4, context=64, width=64, layers=2),
        "small": _lm(200, 32, 4, context=32, width=32, layers=2),
        "mini": _lm(200, 16, 4, context=16, width=16, layers=2),
        "tiny": _lm(40, 8, 4, context=8, width=8, layers=1, heads=2),
    },
    rows=frozenset({"plain", "ggn/scalar", "ggn/lean", "hessian/lean"}),
    adamw=True,
    seconds=(240.0, 25.0),
)

CASES: dict[str, Case] = {
    "resnet18": Case(
        "ResNet-18",
        models.resnet18,
        _COLOURED,
        0,
        _scaled((32, 32, 32, 8, 8), width=(64, 32, 8, 8, 4)),
        compiled=True,
        seconds=(580.0, 50.0),
    ),
    "resnet18-group": Case(
        "ResNet-18 with GroupNorm",
        # The examples of a batch have nothing to do with each other, as SEHT-S wants it.
        partial(models.resnet18, norm="group"),
        _COLOURED,
        0,
        _scaled((128, 128, 128, 8, 8), width=(32, 16, 8, 8, 4)),
        rows=frozenset({"plain", "hessian/scalar", "hessian/s", "ggn/scalar", "ggn/s", "sam"}),
        seconds=(120.0, 20.0),
    ),
    "wrn": Case(
        "Wide ResNet",
        partial(models.WideResNet, classes=10),
        _COLOURED,
        0,
        _scaled(
            (16, 16, 32, 8, 8),
            depth=(16, 16, 10, 10, 10),
            factor=(4, 2, 1, 1, 1),
            width=(None, None, None, 8, 4),
        ),
        seconds=(120.0, 15.0),
    ),
    "lstm": Case(
        "2-layer LSTM language model",
        lambda hidden, **sizes: models.RecurrentLM(
            "lstm", embedding=hidden, hidden=hidden, **sizes
        ),
        text,
        1,
        {
            "full": _lm(5000, 35, 20, hidden=256, dropout=0.5),
            "medium": _lm(1000, 35, 20, hidden=128),
            "small": _lm(200, 20, 20, hidden=48),
            "mini": _lm(100, 12, 12, hidden=32),
            "tiny": _lm(20, 6, 8, hidden=8),
        },
        seconds=(110.0, 15.0),
    ),
    "gpt": Case(
        "small GPT",
        models.GPT,
        text,
        1,
        {
            "full": _lm(256, 128, 8, context=128, width=128, layers=4),
            "medium": _lm(256, 64, 8, context=64, width=64, layers=3),
            "small": _lm(64, 32, 8, context=32, width=32, layers=2),
            "mini": _lm(64, 16, 8, context=16, width=32, layers=2),
            "tiny": _lm(16, 8, 4, context=8, width=8, layers=1, heads=2),
        },
        seconds=(90.0, 10.0),
    ),
    "mlp": Case(
        "MLP",
        lambda width: models.MLP(28 * 28, width, width, 10),
        partial(images, channels=1, size=28),
        0,
        _scaled((128, 128, 128, 64, 16), width=(512, 256, 48, 32, 6)),
        seconds=(15.0, 3.0),
    ),
    "gpt-large-vocabulary": _LARGE,
    "gpt-large-vocabulary-lora": replace(
        _LARGE, title="LoRA on the same", build=_adapted, seconds=(180.0, 20.0)
    ),
}
