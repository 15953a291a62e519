"""The language models: LSTM, GRU and a small GPT.

They take tokens ``(time, batch)`` and return ``(logits, hidden)``, logits
``(time, batch, vocabulary)``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seht.errors import unknown


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
    """A decoder-only transformer; ``hidden`` is ``None``, as every stretch of text begins anew."""

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
