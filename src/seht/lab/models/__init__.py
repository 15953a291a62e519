"""The networks of the experiments: ResNet-18, Wide ResNet, a small CNN, LSTM, GRU, GPT,
MLP, and the upper part of a pretrained EfficientNet-Lite0.

Classifiers take ``(batch, ...)``, such as images ``(batch, channels, height, width)``, and return
logits. Language models take
tokens ``(time, batch)`` and return ``(logits, hidden)``, logits ``(time, batch, vocabulary)``.
:func:`build` makes the network of a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from seht.errors import unknown
from seht.lab.config import MODELS
from seht.lab.models.gpt import GPT, GPTBlock
from seht.lab.models.images import CNN, BasicBlock, ResNet, SmallBlock, WideBlock, WideResNet
from seht.lab.models.images import resnet18 as resnet18
from seht.lab.models.lite0 import Lite0Top
from seht.lab.models.mlp import MLP
from seht.lab.models.parts import ACTIVATIONS, NORMS
from seht.lab.models.text import RecurrentLM

if TYPE_CHECKING:
    from seht.lab.config import ModelConfig
    from seht.lab.data import Data

__all__ = [
    "ACTIVATIONS",
    "CNN",
    "GPT",
    "MLP",
    "NORMS",
    "BasicBlock",
    "GPTBlock",
    "Lite0Top",
    "RecurrentLM",
    "ResNet",
    "SmallBlock",
    "WideBlock",
    "WideResNet",
    "build",
    "resnet18",
]


def build(config: ModelConfig, data: Data) -> nn.Module:
    """The network of a recipe, for this data's classes and shape.

    Its weights are drawn from torch's global random state: seed it before. That the network fits
    the data at all is checked with the recipe.
    """
    if config.name == "gpt":
        return GPT(
            vocabulary=data.classes,
            context=data.context,
            width=config.embedding,
            layers=config.layers,
            heads=config.heads,
            dropout=config.dropout,
        )
    if config.name in MODELS["text"]:
        return RecurrentLM(
            config.name,
            vocabulary=data.classes,
            embedding=config.embedding,
            hidden=config.hidden,
            layers=config.layers,
            dropout=config.dropout,
            init=config.init,
            init_all=config.init_all,
        )
    if config.name in MODELS["features"]:
        linear = config.name == "lite0-linear"
        return Lite0Top(classes=data.classes, dropout=config.dropout, linear=linear)
    task = "text" if data.example is None else ("table", "series", "image")[len(data.example) - 1]
    if config.name not in MODELS[task] or data.example is None:
        raise ValueError(unknown("model", config.name, MODELS[task]))
    channels, *sides = data.example
    if config.name == "mlp":
        inner = [config.width] * config.layers
        return MLP(channels, *inner, data.classes, dropout=config.dropout)
    options: dict[str, Any] = {
        "classes": data.classes,
        "channels": channels,
        "width": config.width,
        "dropout": config.dropout,
        "norm": config.norm,
    }
    if config.name == "resnet18":
        return resnet18(**options)
    if config.name == "wrn":
        return WideResNet(config.depth, config.factor, **options)
    if len(set(sides)) > 1:
        raise ValueError("the cnn takes square images; --model.name resnet18 takes any")
    return CNN(size=sides[0], dims=len(sides), **options)
