"""Small problems for per-sample probes: one for each layer rule, and ways to use a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

N = 5
OPERATORS = {
    "linear": "Linear", "conv1d": "Conv1d", "conv2d": "Conv2d", "conv3d": "Conv3d",
    "transposed1d": "ConvTranspose1d", "transposed2d": "ConvTranspose2d",
    "transposed3d": "ConvTranspose3d", "bilinear": "Bilinear", "embedding": "Embedding",
    "lstm": "LSTM", "gru": "GRU", "rnn": "RNN", "attention": "MultiheadAttention",
    "transformer": "TransformerEncoderLayer", "layer_norm": "LayerNorm",
    "group_norm": "GroupNorm", "instance_norm": "InstanceNorm2d",
    "batch_norm": "BatchNorm2d, eval", "rms_norm": "RMSNorm",
}  # fmt: skip


@dataclass
class Problem:
    """A model, its inputs with the examples along ``dim``, and which weights cannot vary."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    dim: int = 0
    params: str | None = "*"
    shared: frozenset[str] = frozenset()

    @property
    def operator(self) -> str:
        """The row of the support matrix that it speaks for; uses of several layers have none."""
        return "" if self.shared else OPERATORS.get(self.name.split("-")[0], "")

    def __str__(self) -> str:
        return self.name

    def make(self) -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(1)
        model = self.build().double()
        for p in model.parameters():  # so that no weight is zero and no gate saturates
            nn.init.normal_(p, std=0.4)
        x = self.inputs()
        return model, x, torch.randn(N, 2).double()

    def one(self, x: Tensor, y: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Example n as a batch of one."""
        return x.narrow(self.dim, n, 1), y[n : n + 1]


def loss_fn(z: Tensor, y: Tensor) -> Tensor:
    """Curved in the outputs, and a mean over examples; z is (batch, anything)."""
    z = z.flatten(1)
    return ((z[:, :2] - y).pow(2).mean(1) + torch.logsumexp(z, 1)).mean()


class Head(nn.Module):
    """A layer and what makes its outputs (batch, 3)."""

    def __init__(self, layer: nn.Module, first: bool = True) -> None:
        super().__init__()
        self.layer, self.first = layer, first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        y = y if self.first else y.transpose(0, 1)
        y = y.flatten(1)
        return torch.stack([y[:, i::3].sum(1) for i in range(3)], 1)


class Recurrent(nn.Module):
    def __init__(self, kind: type, **options) -> None:
        super().__init__()
        self.rnn = kind(2, 2, **options)
        self.first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.rnn(x)
        y = (y if self.first else y.transpose(0, 1)).flatten(2).mean(1)
        h = h[0] if isinstance(h, tuple) else h
        return torch.cat([y, h.transpose(0, 1).flatten(1)], 1)


class Packed(nn.Module):
    def __init__(self, kind: type, **options) -> None:
        super().__init__()
        self.rnn = kind(2, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        # The number of steps is the example's own: 2, 3, 4 by its first entry.
        lengths = 2 + (x[:, 0, 0] * 7).long().abs() % 3
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, h = self.rnn(packed)
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=4)
        h = h[0] if isinstance(h, tuple) else h
        return torch.cat([y.sum(1), h.transpose(0, 1).flatten(1)], 1)


class Cells(nn.Module):
    """A recurrence written by hand, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(2, 2), nn.GRUCell(2, 2), nn.RNNCell(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 2, dtype=x.dtype)
        state, g, r = (h, h), h, h
        for step in x.unbind(1):
            state = self.lstm(step, state)
            g, r = self.gru(step, g), self.rnn(step, r)
        return torch.cat([state[0], g, r], 1)


class Tied(nn.Module):
    """Embedding and decoder are one table; a token comes several times in an example."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, padding_idx=1)
        self.mix = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.table(ids).cumsum(1)))
        return F.linear(h, self.table.weight).mean(1)


class TwoLayouts(nn.Module):
    """(time, batch) outside, (time * batch, width) at the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(5, 3), nn.Embedding(4, 3)
        self.rnn, self.decoder = nn.GRU(3, 2), nn.Linear(2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(len(ids))).unsqueeze(1)
        y, _ = self.rnn(x)
        z = self.decoder(y.reshape(-1, 2))
        return z.view(*ids.shape, 3).transpose(0, 1)


class Windows(nn.Module):
    """Images cut into windows that stand in the batch dimension, as some vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 2, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        b = len(x)
        w = x.view(b, 1, 2, 2, 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 1, 2, 2)
        y = torch.tanh(self.conv(w)).flatten(1)
        y = self.linear(y).view(b, 4, 3).softmax(1)
        return y.sum(1) + y[:, 0]


class Views(nn.Module):
    """Weights seen through views: transposed, in chunks, as a matrix, by addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3))
        self.v = nn.Parameter(torch.zeros(3, 6))
        self.kernel = nn.Parameter(torch.zeros(2, 2, 1))
        self.b = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w)
        first, second = self.v.chunk(2, 1)
        h = torch.tanh(F.linear(h @ self.w.t(), self.w.T)) + torch.tanh(h @ first) * (h @ second)
        h = F.linear(h[:, :2], self.kernel.view(2, 2))
        return torch.addmm(self.b, h, self.kernel.squeeze(-1)) * h


class Mixed(nn.Module):
    """A scale and a table that have no per-sample form, beside layers that have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.a, self.b = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.scale
        return torch.tanh(self.second(h) + F.linear(h, self.a @ self.b))


class Attention(nn.Module):
    def __init__(self, first: bool, weights: bool, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=first, **options)
        self.first, self.weights, self.other = first, weights, bool(options.get("kdim"))

    def forward(self, x: Tensor) -> Tensor:
        k = x[..., :3] if self.other else x
        y, w = self.attention(x, k, k, need_weights=self.weights)
        y = y if self.first else y.transpose(0, 1)
        return y.mean(1) if w is None else y.mean(1) + w.mean((1, 2)).unsqueeze(1)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x[:, :2], torch.tanh(x[:, 1:]))


class Chain(nn.Sequential):
    pass


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape).double()


def tokens(*shape: int, top: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(top, shape)


def normed(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Head(Chain(nn.Conv2d(2, 4, 2), norm(), nn.Tanh(), nn.Conv2d(4, 3, 2)))


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    return norm.eval()


IMAGE = normal(N, 4, 3, 3)
PROBLEMS = [
    Problem("linear", lambda: Chain(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), normal(N, 4)),
    Problem("linear-3d", lambda: Head(nn.Linear(4, 3)), normal(N, 2, 4)),
    Problem("conv1d", lambda: Head(nn.Conv1d(2, 3, 3, padding=1)), normal(N, 2, 4)),
    Problem("conv2d", lambda: Head(nn.Conv2d(4, 3, 2, stride=2, padding=1)), IMAGE),
    Problem("conv2d-same", lambda: Head(nn.Conv2d(4, 2, (2, 3), padding="same")), IMAGE),
    Problem("conv1d-same-behind", lambda: Head(Chain(
        nn.Conv1d(2, 3, 1), nn.Tanh(), nn.Conv1d(3, 2, 2, padding="same"))), normal(N, 2, 3)),
    Problem("conv2d-valid", lambda: Head(nn.Conv2d(4, 2, 2, padding="valid")), IMAGE),
    Problem("conv2d-grouped", lambda: Head(nn.Conv2d(4, 6, 2, groups=2, dilation=2)), IMAGE),
    Problem("conv2d-depthwise", lambda: Head(nn.Conv2d(4, 8, 2, groups=4)), IMAGE),
    Problem("conv2d-circular", lambda: Head(nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular")),
            IMAGE),
    Problem("conv3d", lambda: Head(nn.Conv3d(2, 3, 2)), normal(N, 2, 2, 3, 2)),
    Problem("transposed1d", lambda: Head(nn.ConvTranspose1d(2, 3, 2)), normal(N, 2, 3)),
    Problem("transposed2d", lambda: Head(nn.ConvTranspose2d(4, 3, 2, 2, output_padding=1)), IMAGE),
    Problem("transposed2d-grouped", lambda: Head(nn.ConvTranspose2d(4, 6, 2, groups=2)), IMAGE),
    Problem("transposed3d", lambda: Head(nn.ConvTranspose3d(2, 3, 2)), normal(N, 2, 1, 2, 2)),
    Problem("bilinear", Pair, normal(N, 4)),
    Problem("embedding-tied", Tied, tokens(N, 4, top=4)),
    Problem("lstm", lambda: Recurrent(nn.LSTM), normal(2, N, 2), dim=1),
    Problem("lstm-deep", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True,
            batch_first=True), normal(N, 2, 2)),
    Problem("gru", lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), normal(2, N, 2),
            dim=1),
    Problem("rnn", lambda: Recurrent(nn.RNN, bias=False, batch_first=True), normal(N, 2, 2)),
    Problem("rnn-relu", lambda: Recurrent(nn.RNN, nonlinearity="relu"), normal(2, N, 2), dim=1),
    Problem("lstm-packed", lambda: Packed(nn.LSTM, batch_first=True, bidirectional=True),
            normal(N, 4, 2)),
    Problem("gru-packed", lambda: Packed(nn.GRU, batch_first=True, num_layers=2), normal(N, 4, 2)),
    Problem("cells", Cells, normal(N, 2, 2)),
    Problem("attention", lambda: Attention(True, False), normal(N, 3, 4)),
    Problem("attention-time-first", lambda: Attention(False, True), normal(3, N, 4), dim=1),
    Problem("attention-other-keys", lambda: Attention(True, False, kdim=3, vdim=3),
            normal(N, 3, 4)),
    Problem("transformer", lambda: Head(nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0,
            activation="gelu", batch_first=True)), normal(N, 3, 4)),
    Problem("layer_norm", normed(lambda: nn.LayerNorm([4, 3, 3])), normal(N, 2, 4, 4)),
    Problem("group_norm", normed(lambda: nn.GroupNorm(2, 4)), normal(N, 2, 4, 4)),
    Problem("instance_norm", normed(lambda: nn.InstanceNorm2d(4, affine=True)),
            normal(N, 2, 4, 4)),
    Problem("batch_norm-eval", normed(batch_norm), normal(N, 2, 4, 4)),
    Problem("rms_norm", lambda: Head(Chain(nn.Linear(4, 3), nn.RMSNorm(3))), normal(N, 2, 4)),
    Problem("views", Views, normal(N, 4)),
    Problem("windows", Windows, normal(N, 1, 4, 4)),
    Problem("time-and-batch", TwoLayouts, tokens(4, N, top=5), dim=1,
            shared=frozenset({"place.weight"})),
    Problem("mixed", Mixed, normal(N, 4), shared=frozenset({"scale", "a", "b"})),
]  # fmt: skip


def find(name: str) -> Problem:
    return next(p for p in PROBLEMS if p.name == name)
