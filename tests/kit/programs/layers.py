"""Nodes with weights, and their written-out forms."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.nodes import Node, Run, Weights


class Linear(Node):
    """Over the last dimension."""

    def __init__(self, shape: torch.Size, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[-1], width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        return (x.unsqueeze(-2) * w["layer.weight"]).sum(-1) + w["layer.bias"]


class Outside(Linear):
    """The same, with positions before examples in memory and in the call."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Einsum(Linear):
    """The weight in another spelling, and through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("n...i,io->n...o", x, self.layer.weight.t()) + self.layer.bias


class Conv2d(Node):
    def __init__(
        self, shape: torch.Size, width: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        width = shape[0] if groups > 1 else width
        groups = shape[0] if groups > 1 else 1
        self.layer = nn.Conv2d(shape[0], width, kernel, stride, kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        kernel, stride, pad = self.layer.kernel_size[0], self.layer.stride[0], self.layer.padding[0]
        x = F.pad(x, (pad, pad, pad, pad))
        x = x.unfold(2, kernel, stride).unfold(3, kernel, stride)  # (N, C, h, w, k, k)
        weight = w["layer.weight"]
        if self.layer.groups > 1:
            y = (x * weight[:, 0, None, None]).sum((-1, -2))
        else:
            y = torch.einsum("nchwkl,ockl->nohw", x, weight)
        return y + w["layer.bias"][:, None, None]


class Conv1d(Node):
    """Over the positions of a sequence."""

    def __init__(self, shape: torch.Size, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(shape[-1], width, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        x = F.pad(x, (0, 0, 1, 1)).unfold(1, 2, 1)  # (N, t, D, 2)
        return torch.einsum("ntdk,odk->nto", x, w["layer.weight"]) + w["layer.bias"]


class Attention(Node):
    """Self-attention by the fused kernel."""

    def __init__(self, shape: torch.Size, width: int, causal: bool = False) -> None:
        super().__init__()
        self.causal, self.width = causal, width
        self.qkv = nn.Linear(shape[-1], 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        y = (x.unsqueeze(-2) * w["qkv.weight"]).sum(-1) + w["qkv.bias"]
        q, k, v = (y[..., i * self.width : (i + 1) * self.width] for i in range(3))
        scores = torch.exp(q @ k.transpose(1, 2) / math.sqrt(self.width))
        if self.causal:
            scores = scores * torch.ones_like(scores).tril()
        return scores @ v / scores.sum(-1, keepdim=True)


class Gru(Node):
    def __init__(self, shape: torch.Size, width: int) -> None:
        super().__init__()
        self.layer = nn.GRU(shape[-1], width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        h = x.new_zeros(x.shape[0], self.layer.hidden_size)
        outputs = []
        for t in range(x.shape[1]):
            a = x[:, t] @ w["layer.weight_ih_l0"].t() + w["layer.bias_ih_l0"]
            b = h @ w["layer.weight_hh_l0"].t() + w["layer.bias_hh_l0"]
            (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
            r, z = 1 / (1 + torch.exp(-ar - br)), 1 / (1 + torch.exp(-az - bz))
            h = (1 - z) * torch.tanh(an + r * bn) + z * h
            outputs.append(h)
        return torch.stack(outputs, 1)


class Prelu(Node):
    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.layer = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        mask = (x.detach() > 0).to(x.dtype)
        return mask * x + (1 - mask) * w["layer.weight"] * x


class Norm(Node):
    """A fused norm; in the truth mean and variance are written out."""

    def __init__(self, kind: str, shape: torch.Size) -> None:
        super().__init__()
        self.kind, self.couples = kind, kind == "batch"
        channels = shape[0] if len(shape) == 3 else shape[-1]
        self.layer = {
            "batch": lambda: (nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(channels),
            "batch-eval": lambda: (nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(channels),
            "instance": lambda: nn.InstanceNorm2d(channels, affine=True),
            "group": lambda: nn.GroupNorm(1, channels),
            "layer": lambda: nn.LayerNorm(shape[-1]),
            "rms": lambda: nn.RMSNorm(shape[-1], eps=1e-2),
        }[kind]()
        if hasattr(self.layer, "eps"):
            self.layer.eps = 1e-2  # nearly constant inputs would want steps of their own
        if kind == "batch-eval":
            self.layer.eval()
            self.layer.running_mean.normal_(0, 0.3)

    @property
    def channels_first(self) -> bool:
        return self.kind in ("batch", "batch-eval", "instance", "group")

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and self.channels_first:
            return self.layer(x.transpose(1, 2)).transpose(1, 2)
        return self.layer(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        sequence = x.dim() == 3 and self.channels_first
        x = x.transpose(1, 2).contiguous() if sequence else x
        y = (x - self._mean(x)) / torch.sqrt(self._variance(x) + self.layer.eps)
        shape = [1, -1, *[1] * (x.dim() - 2)] if self.channels_first else [-1]
        y = y * w["layer.weight"].view(shape)
        y = y + w["layer.bias"].view(shape) if "layer.bias" in w else y
        return y.transpose(1, 2).contiguous() if sequence else y

    def _over(self, x: Tensor) -> tuple[int, ...]:
        return {
            "batch": (0, *range(2, x.dim())), "instance": tuple(range(2, x.dim())),
            "group": tuple(range(1, x.dim())), "layer": (-1,), "rms": (-1,),
        }[self.kind]  # fmt: skip

    def _mean(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return torch.zeros_like(x)
        if self.kind == "batch-eval":
            return self.layer.running_mean.view(1, -1, *[1] * (x.dim() - 2))
        return self._average(x)

    def _variance(self, x: Tensor) -> Tensor:
        if self.kind == "batch-eval":
            return self.layer.running_var.view(1, -1, *[1] * (x.dim() - 2))
        return self._average((x - self._mean(x)) ** 2)

    def _average(self, x: Tensor) -> Tensor:
        dims = self._over(x)
        count = math.prod(x.shape[d] for d in dims)
        return x.sum(dims, keepdim=True) / count


class Embedding(Node):
    """The first node of a sequence of tokens."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Embedding(count, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        weight = w["layer.weight"]
        return F.one_hot(x, weight.shape[0]).to(weight.dtype) @ weight
