"""The multi-layer perceptron."""

from __future__ import annotations

from torch import Tensor, nn

from seht.lab.models.parts import activated


class MLP(nn.Module):
    """Linear layers of these sizes with an activation in between; images are flattened."""

    def __init__(self, *sizes: int, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(
                f"an MLP needs at least two sizes, such as MLP(784, 100, 10), not {sizes}"
            )
        self.linears = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.act = activated(activation)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = x.flatten(1)
        for linear in self.linears[:-1]:
            x = self.act(linear(x))
        return self.linears[-1](self.dropout(x))
