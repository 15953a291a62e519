"""The networks of the experiments: ResNet-18, Wide ResNet, LSTM, GRU, a small GPT and an MLP.

Image models take ``(batch, channels, height, width)`` and return logits. Language models take
tokens ``(time, batch)`` and return ``(logits, hidden)``, logits ``(time, batch, vocabulary)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.estimators import unknown

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ValueError(unknown("activation", name, ACTIVATIONS))
    return ACTIVATIONS[name]


def _norm(name: str, channels: int) -> nn.Module:
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "group":  # some 16 channels to a group, whatever the width
        return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)
    raise ValueError(unknown("norm", name, ["batch", "group"]))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


# --- ResNet-18 --------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """conv, norm, activation, conv, norm, plus the shortcut; then the activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, 3, stride), _norm(norm, outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 3), _norm(norm, outputs)
        self.act = _activation(activation)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), _norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after the activation."""
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet with a CIFAR stem (3x3, stride 1, no pooling); ``width`` 64 is the usual one."""

    def __init__(
        self,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        *,
        classes: int = 10,
        width: int = 64,
        norm: str = "batch",
        activation: str = "relu",
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(channels, width, 3), _norm(norm, width)
        self.act = _activation(activation)
        self.layers, inputs = nn.Sequential(), width
        for i, count in enumerate(blocks):
            layer, outputs = nn.Sequential(), width * 2**i
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                layer.append(BasicBlock(inputs, outputs, stride, norm, activation))
                inputs = outputs
            self.layers.append(layer)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.layers(self.act(self.norm1(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


def resnet18(**options: Any) -> ResNet:
    """ResNet-18: four layers of two blocks; 11,173,962 parameters with 10 classes."""
    return ResNet((2, 2, 2, 2), **options)


# --- Wide ResNet ------------------------------------------------------------------------------


class WideBlock(nn.Module):
    """norm, activation, conv, norm, activation, dropout, conv, plus the shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, dropout: float, norm: str, activation: str
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(norm, inputs), _conv(inputs, outputs, 3, stride)
        self.norm2, self.conv2 = _norm(norm, outputs), _conv(outputs, outputs, 3)
        self.act, self.dropout = _activation(activation), nn.Dropout(dropout)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, before the next block's norm and activation."""
        y = self.act(self.norm1(x))
        # As in the original: a projection sees the activated input, an identity the raw one.
        skip = x if self.shortcut is None else self.shortcut(y)
        y = self.act(self.norm2(self.conv1(y)))
        return self.conv2(self.dropout(y)) + skip


class WideResNet(nn.Module):
    """WRN-depth-factor, pre-activation; WRN-28-10 has 36,536,884 parameters with 100 classes."""

    def __init__(
        self,
        depth: int = 28,
        factor: int = 10,
        *,
        classes: int = 100,
        dropout: float = 0.0,
        width: int = 16,
        norm: str = "batch",
        activation: str = "relu",
        channels: int = 3,
    ) -> None:
        super().__init__()
        count, rest = divmod(depth - 4, 6)
        if rest or count < 1:
            raise ValueError(
                f"the depth of a Wide ResNet is 6n + 4 (10, 16, 22, 28 ...), not {depth}"
            )
        self.conv1 = _conv(channels, width, 3)
        self.layers, inputs = nn.Sequential(), width
        for i in range(3):
            layer, outputs = nn.Sequential(), width * factor * 2**i
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                layer.append(WideBlock(inputs, outputs, stride, dropout, norm, activation))
                inputs = outputs
            self.layers.append(layer)
        self.norm, self.act = _norm(norm, inputs), _activation(activation)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.act(self.norm(self.layers(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


# --- recurrent language models ----------------------------------------------------------------


class RecurrentLM(nn.Module):
    """Embedding, ``layers`` of LSTM or GRU, decoder (untied), with dropout in between.

    ``init`` b draws every parameter from U(-b, b); ``init_all=False`` does so for embedding and
    decoder only and leaves PyTorch's own start to the recurrent layers.
    """

    def __init__(
        self,
        cell: str = "lstm",
        *,
        vocabulary: int = 33278,
        embedding: int = 512,
        hidden: int = 512,
        layers: int = 2,
        dropout: float = 0.5,
        init: float = 0.1,
        init_all: bool = True,
    ) -> None:
        super().__init__()
        if cell not in ("lstm", "gru"):
            raise ValueError(unknown("cell", cell, ["lstm", "gru"]))
        kind = nn.LSTM if cell == "lstm" else nn.GRU
        self.embedding = nn.Embedding(vocabulary, embedding)
        # With one layer there is nothing to drop in between, and PyTorch warns about it.
        self.rnn = kind(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(dropout)
        for part in (self.embedding, self.decoder, *([self.rnn] if init_all else [])):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -init, init)

    def forward(self, tokens: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        """Logits, and the hidden state to carry to the next stretch of text (detach it there)."""
        output, hidden = self.rnn(self.dropout(self.embedding(tokens)), hidden)
        return self.decoder(self.dropout(output)), hidden


# --- a small GPT ------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """Pre-LayerNorm causal attention and a GELU MLP, each added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate, self.drop = heads, dropout, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One block, on ``(batch, time, width)``."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.rate if self.training else 0.0,
            is_causal=True,
        )
        x = x + self.drop(self.project(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder-only transformer; ``hidden`` is ``None``, as it keeps no state."""

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        context: int = 64,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of heads ({heads})")
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads, dropout) for _ in range(layers)))
        self.norm, self.decoder = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor, hidden: None = None) -> tuple[Tensor, None]:
        """Logits, and ``None`` where a recurrent model has its hidden state."""
        places = torch.arange(len(tokens), device=tokens.device)
        x = self.drop(self.token(tokens.t()) + self.place(places))
        return self.decoder(self.norm(self.blocks(x))).transpose(0, 1), hidden


# --- MLP --------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Linear layers of these sizes with an activation in between; images are flattened."""

    def __init__(self, *sizes: int, activation: str = "relu") -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(
                f"an MLP needs at least two sizes, such as MLP(784, 100, 10), not {sizes}"
            )
        self.linears = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.act = _activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = x.flatten(1)
        for linear in self.linears[:-1]:
            x = self.act(linear(x))
        return self.linears[-1](x)
