"""What the problem cases are put together from: small bodies, losses and modules."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Problem = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
"""``(model, batch, loss_fn)``: the loss is ``loss_fn(model, batch)``."""


# --- losses -----------------------------------------------------------------------------------


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    logits, _ = model(batch[:-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[1:].flatten())


def same_mask(loss_fn: Callable) -> Callable:
    """Every evaluation draws the same dropout mask."""

    def call(model, batch):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return loss_fn(model, batch)

    return call


# --- problems ---------------------------------------------------------------------------------


def roughen(model: nn.Module) -> nn.Module:
    """In float64, and no weight left at a special value such as 0 or 1."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def classifier(
    body: nn.Module, x: Tensor, *, train: bool = True, loss_fn: Callable = classify
) -> Problem:
    """``body``, then a linear layer to three classes."""
    body = roughen(body)
    if x.is_floating_point():
        x = x.double()
    with torch.no_grad():
        size = body(x).flatten(1).shape[1]  # this also moves running statistics off 0 and 1
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(size, 3).double())
    return model.train(train), (x, torch.arange(len(x)) % 3), loss_fn


def vector(*ops: nn.Module, width: int = 5, scale: float = 1.0, **options: Any) -> Callable:
    """Linear, the operators, tanh, linear; on vectors. (``ops`` are copied: a case is fresh.)"""

    def make() -> Problem:
        body = nn.Sequential(nn.Linear(4, width), *copy.deepcopy(ops), nn.Tanh())
        return classifier(body, scale * torch.randn(6, 4), **options)

    return make


def image(*ops: nn.Module, dims: int = 2, **options: Any) -> Callable:
    """Convolution, the operators, tanh, linear; on images of ``dims`` dimensions."""

    def make() -> Problem:
        conv = getattr(nn, f"Conv{dims}d")(2, 4, 2)
        body = nn.Sequential(conv, *copy.deepcopy(ops), nn.Tanh())
        size = {1: (8,), 2: (5, 5), 3: (3, 3, 3)}[dims]
        return classifier(body, torch.randn(4, 2, *size), **options)

    return make


def tokens(*ops: nn.Module) -> Callable:
    """The operators, the first an embedding, then tanh, linear; some tokens occur twice."""
    ids = torch.tensor([[0, 1, 2], [3, 1, 1], [4, 0, 5], [2, 6, 3]])
    return lambda: classifier(nn.Sequential(*copy.deepcopy(ops), nn.Tanh()), ids)


def body(build: Callable[[], nn.Module], *shape: int, **options: Any) -> Callable:
    """A whole body, built anew each time."""
    return lambda: classifier(build(), torch.randn(*shape), **options)


def logits_loss(loss: Callable[[Tensor, Tensor, Tensor], Tensor], scale: float = 1.0) -> Callable:
    """``loss(z, y, t)`` of the logits, labels and a real target of the logits' shape."""
    target = torch.linspace(-2, 2, 18).double().view(6, 3).cos()

    def loss_fn(model, batch):
        x, y = batch
        return loss(scale * model(x), y, target)

    return vector(loss_fn=loss_fn)


def pictures(build: Callable[[], nn.Module], loss_fn: Callable = classify) -> Callable:
    def make() -> Problem:
        batch = torch.randn(4, 3, 12, 12).double(), torch.arange(4) % 3
        return roughen(build()), batch, loss_fn

    return make


def text(build: Callable[[], nn.Module], loss_fn: Callable = next_token) -> Callable:
    return lambda: (roughen(build()), torch.randint(11, (6, 3)), loss_fn)


# --- modules ----------------------------------------------------------------------------------


def weight_norm(old: bool, **options: Any) -> Callable[[], nn.Module]:
    apply = nn.utils.weight_norm if old else parametrizations.weight_norm
    return lambda: nn.Sequential(apply(nn.Linear(4, 5), **options), nn.Tanh())


def spectral_norm(old: bool) -> Callable[[], nn.Module]:
    apply = nn.utils.spectral_norm if old else parametrizations.spectral_norm
    return lambda: nn.Sequential(apply(nn.Linear(4, 5)), nn.Tanh())


class SelfAttention(nn.Module):
    """Through ``nn.MultiheadAttention``."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need = nn.MultiheadAttention(4, 2, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need)[0]


class Dot(nn.Module):
    """Through ``F.scaled_dot_product_attention``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.options = nn.Linear(4, 12), options

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def encoder(activation: str, first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, activation=activation, batch_first=True, norm_first=first
    )


class First(nn.Module):
    """A recurrent layer's outputs, batch first, without its state."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Pair(nn.Module):
    """A bilinear layer on two functions of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bilinear = nn.Linear(4, 3), nn.Bilinear(3, 3, 4)

    def forward(self, x):
        h = self.first(x)
        return self.bilinear(h, h.tanh())
