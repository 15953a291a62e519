"""The recurrent language models: LSTM and GRU.

They take tokens ``(time, batch)`` and return ``(logits, hidden)``, logits
``(time, batch, vocabulary)``.
"""

from __future__ import annotations

from typing import Any

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
