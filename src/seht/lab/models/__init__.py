"""The networks of the experiments: ResNet-18, Wide ResNet, a small CNN, LSTM, GRU, GPT,
MLP, and the upper part of a pretrained EfficientNet-Lite0.

Classifiers take ``(batch, ...)``, such as images ``(batch, channels, height, width)``, and return
logits. Language models take tokens ``(time, batch)`` and return ``(logits, hidden)``, logits
``(time, batch, vocabulary)``. :func:`build` makes the network of a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from seht.errors import unknown
from seht.lab.config import MODELS
from seht.lab.models.classifiers import CNN, MLP, ResNet, WideResNet, resnet18
from seht.lab.models.lite0 import Lite0Top
from seht.lab.models.text import GPT, RecurrentLM

if TYPE_CHECKING:
    from seht.lab.config import ModelConfig
    from seht.lab.data import Data

__all__ = ["CNN", "GPT", "MLP", "RecurrentLM", "ResNet", "WideResNet", "build", "resnet18"]


def build(config: ModelConfig, data: Data) -> nn.Module:
    """The network of a recipe, for this data's classes and shape.

    Its weights are drawn from torch's global random state: seed it before. That the network fits
    the data at all is checked with the recipe.
    """

    def own(*names: str) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    if config.name == "gpt":
        sizes = {"vocabulary": data.classes, "context": data.context, "width": config.embedding}
        return GPT(**sizes, **own("layers", "heads", "dropout"))
    if config.name in MODELS["text"]:
        options = own("embedding", "hidden", "layers", "dropout", "init", "init_all")
        return RecurrentLM(config.name, vocabulary=data.classes, **options)
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
    options = {"classes": data.classes, "channels": channels, **own("width", "dropout", "norm")}
    if config.name == "resnet18":
        return resnet18(**options)
    if config.name == "wrn":
        return WideResNet(config.depth, config.factor, **options)
    if len(set(sides)) > 1:
        raise ValueError("the cnn takes square images; --model.name resnet18 takes any")
    return CNN(size=sides[0], dims=len(sides), **options)
