"""A small GPT.

It takes tokens ``(time, batch)`` and returns ``(logits, hidden)`` as the recurrent models do, with
logits ``(time, batch, vocabulary)``. It keeps no state: every stretch of text begins anew.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
