"""A program as a module: ``forward`` is the user's, ``logits`` the truth's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs.elementwise import ELEMENTWISE
from programs.layers import (
    Attention,
    Conv1d,
    Conv2d,
    Einsum,
    Gru,
    Linear,
    Norm,
    Outside,
    Prelu,
)  # fmt: skip
from programs.layouts import LAYOUTS
from programs.nodes import Node, Pure, Random, Run, Tape, Weights
from programs.pools import POOLS_1D, POOLS_2D, SORTS
from programs.randoms import RANDOMS

IMAGE_LAYERS: dict[str, Callable[[torch.Size, int], Node]] = {
    "conv": lambda shape, width: Conv2d(shape, width, 3),
    "conv-1": lambda shape, width: Conv2d(shape, width, 1),
    "conv-stride": lambda shape, width: Conv2d(shape, width, 3, 2),
    "depthwise": lambda shape, width: Conv2d(shape, width, 3, groups=2),
    "linear": Linear,
}
SEQUENCE_LAYERS: dict[str, Callable[[torch.Size, int], Node]] = {
    "linear": Linear,
    "outside": Outside,
    "einsum": Einsum,
    "conv": Conv1d,
    "attention": Attention,
    "causal": lambda shape, width: Attention(shape, width, causal=True),
    "gru": Gru,
}
NORMS = {
    True: ["batch", "batch-eval", "instance", "group", "layer", "rms"],
    False: ["batch", "batch-eval", "group", "layer", "rms"],
}


def menu(image: bool) -> dict[str, list[str]]:
    """The names of all nodes without weights, by kind."""
    return {
        "act": [*ELEMENTWISE, "prelu"],
        "layout": list(LAYOUTS),
        "pool": list(POOLS_2D if image else POOLS_1D),
        "sort": list(SORTS),
        "random": list(RANDOMS),
        "norm": NORMS[image],
    }


def make(name: str, shape: torch.Size, tape: Tape) -> Node:
    """The node of that name for inputs of this shape."""
    kind, _, name = name.partition(":")
    if kind == "random":
        return Random(RANDOMS[name], tape)
    if kind == "norm":
        return Norm(name, shape)
    if name == "prelu":
        return Prelu(shape)
    pools = POOLS_2D if len(shape) == 3 else POOLS_1D
    return Pure(*{"act": ELEMENTWISE, "layout": LAYOUTS, "sort": SORTS, "pool": pools}[kind][name])


def fits(node: Node, shape: torch.Size) -> torch.Size | None:
    """The shape of what it puts out, without the examples; None if it cannot be."""
    try:
        with torch.no_grad():
            y = node(torch.rand(4, *shape))
    except (RuntimeError, IndexError, ValueError):
        return None
    good = y.dim() == len(shape) + 1 and y.shape[0] == 4 and y.numel() and y.isfinite().all()
    return y.shape[1:] if good else None


class Block(nn.Module):
    """Nodes one after the other, perhaps recomputed in the backward pass, perhaps residual."""

    def __init__(self, nodes: list[Node], residual: bool, recompute: str, tape: Tape) -> None:
        super().__init__()
        self.nodes, self.residual = nn.ModuleList(nodes), residual
        self.recompute, self.tape = recompute, tape

    def body(self, x: Tensor) -> Tensor:
        for node in self.nodes:
            x = node(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "none" or self.tape.recording:
            y = self.body(x)
        else:
            y = checkpoint(self.body, x, use_reentrant=self.recompute == "old")
        return x + y if self.residual else y

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        y = x
        for i, node in enumerate(self.nodes):
            start = f"nodes.{i}."
            own = {k[len(start) :]: v for k, v in w.items() if k.startswith(start)}
            y = node.plain(y.contiguous(), own, run).contiguous()
        return x + y if self.residual else y


class Program(nn.Module):
    """Blocks, a head, and perhaps a log-softmax that belongs to the model."""

    def __init__(self, blocks: list[Block], inputs: int, classes: int, head: str) -> None:
        super().__init__()
        self.blocks, self.head, self.kind = nn.ModuleList(blocks), nn.Linear(inputs, classes), head

    @property
    def couples(self) -> bool:
        return any(node.couples for block in self.blocks for node in block.nodes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        z = self.head(x.flatten(1))
        return z.log_softmax(1) if self.kind == "log-softmax" else z

    def logits(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        """Everything before the log-softmax, in plain form."""
        for i, block in enumerate(self.blocks):
            start = f"blocks.{i}."
            own = {k[len(start) :]: v for k, v in w.items() if k.startswith(start)}
            x = block.plain(x, own, run)
        return x.reshape(x.shape[0], -1) @ w["head.weight"].t() + w["head.bias"]
