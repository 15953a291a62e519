"""What autograd holds constant although it depends on the weights, and what steers by values."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kinked import ROW, add
from torch import Tensor, nn
from torch.nn.utils import parametrizations

PLACES = torch.arange(ROW[1])


# --- comparisons and what they steer ----------------------------------------------------------


def overwritten(z: Tensor) -> Tensor:
    y = 1.0 * z
    y[y > 0.5] = 0.5
    return y


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """On pieces of five numbers: so many decisions that a coarse step changes one."""
    return lambda z: torch.stack([function(piece) for piece in z.view(-1, 5)])


def mask_in_place(z: Tensor) -> Tensor:
    mask = z > 0
    mask &= z < 0.7
    return z * mask


def index_in_place(z: Tensor) -> Tensor:
    index = z.argmax(1, keepdim=True)
    index += 1
    index %= ROW[1]
    return z.gather(1, index) * z


add(
    {
        "where": lambda z: torch.where(z > 0, z, 0.1 * z),
        "where-indices": lambda z: z[torch.where(z.ge(0.1))],
        "mask": lambda z: z[z > 0.2],
        "masked_fill": lambda z: z.masked_fill(z < -0.2, 1.0),
        "masked_select": lambda z: z.masked_select(z.gt(0.2)),
        "two-masks": lambda z: z * ((z > 0) & ~(z < 1)).double(),
        "logical": lambda z: z * torch.logical_xor(z.le(0), z.lt(1)),
        "overwritten": overwritten,
        "branch": each(lambda x: x.square() if x[0] > x[1] else x),
        "builtin-max": each(lambda x: max(x[0], x[1], x[2])),
        "argmax": lambda z: z.gather(1, z.argmax(1, keepdim=True)),
        "one_hot": lambda z: z * F.one_hot(z.argmin(1), ROW[1]),
        "argsort": lambda z: z * z.argsort(1) / ROW[1],
        "nonzero": lambda z: z.flatten()[(z > 0.3).flatten().nonzero().squeeze(1)],
        "matrix_rank": each(lambda x: x * torch.linalg.matrix_rank(x.diag(), atol=0.5)),
        "searchsorted": lambda z: z * torch.searchsorted(PLACES / 9 - 2, z) / 9,
        "mask-in-place": mask_in_place,
        "index-in-place": index_in_place,
        "gumbel_softmax": lambda z: F.dropout(F.gumbel_softmax(z, 3.0, hard=True) * PLACES, 0.4),
    }
)


# --- detached values --------------------------------------------------------------------------


def no_grad(z: Tensor) -> Tensor:
    with torch.no_grad():
        t = z.softmax(1)
        t.mul_(2)  # written in place, from numbers and from random ones
        t += 0.1 * torch.rand(ROW[1])
        t[0] = 0.5
        best, place = t.max(1, keepdim=True)
        t /= best
    return F.dropout(z * t, 0.3) + place / ROW[1]


@torch.no_grad()
def teacher(z: Tensor) -> Tensor:
    return z.relu().exp()


def nested(z: Tensor) -> Tensor:
    with torch.no_grad():
        t = z.exp()
        with torch.enable_grad():
            y = z.relu()
    return y * t


def set_grad_enabled(z: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        t = z.exp()
    return z * t


def inference(z: Tensor) -> Tensor:
    with torch.inference_mode():
        t = z.exp()
    return z * t.clone()


def detach_(z: Tensor) -> Tensor:
    return z * z.tanh().detach_()


def overwritten_later(z: Tensor) -> Tensor:
    """A statistic of what an activation then overwrites: the detached tensor is the same memory."""
    y = 1.0 * z
    mean = y.detach().square().mean(1, keepdim=True)
    return F.relu(y, inplace=True) * mean


def adversarial(z: Tensor) -> Tensor:
    """A step along the sign of a gradient that is taken inside the closure."""
    (g,) = torch.autograd.grad((z**3).sin().sum(), z, retain_graph=True)
    return z + 0.3 * g.sign()


def gradient_penalty(z: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((z.relu() ** 2).sin().sum(), z, create_graph=True)
    return g.abs()


add(
    {
        "detach": lambda z: z * z.detach().exp(),
        "torch.detach": lambda z: z * torch.detach(z).exp(),
        "detach_": detach_,
        "detach-overwritten": overwritten_later,
        "data": lambda z: z * z.data.exp(),
        "item": lambda z: z * z[0, 0].item() * z[0, 1].item(),
        "float": lambda z: z * float(z.square().mean()),
        "int": each(lambda x: x * int(2 * x[0])),
        "tolist": lambda z: z * torch.tensor(z[0].tolist(), dtype=z.dtype),
        "numpy": lambda z: z * torch.from_numpy(z.detach().numpy()),
        "long": lambda z: z * (2 * z).long(),
        "to-int": lambda z: z * (2 * z).to(torch.int32),
        "to-keyword": lambda z: z * (2 * z.square()).to(dtype=torch.uint8),
        "type": lambda z: z * (2 * z).type(torch.long),
        "straight-through-round": lambda z: z + (z.round() - z).detach(),
        "straight-through-sign": lambda z: z.tanh() + (z.sign() - z.tanh()).detach(),
        "bernoulli": lambda z: F.dropout(z * torch.bernoulli(z.sigmoid()), 0.3),
        "bernoulli_": lambda z: F.dropout(z * torch.zeros_like(z).bernoulli_(z.sigmoid()), 0.3),
        "normal": lambda z: F.dropout(z * torch.normal(z, 1.0), 0.3),
        "poisson": lambda z: F.dropout(z * torch.poisson(z.exp()) / 9, 0.3),
        "multinomial": lambda z: F.dropout(z * torch.multinomial(z.softmax(1), 1) / 40, 0.3),
        "adversarial": adversarial,
    }
)
add(
    {
        # Not in the table: the mode itself knows them.
        "no_grad": no_grad,
        "no_grad-decorator": lambda z: z * teacher(z),
        "no_grad-nested": nested,
        "set_grad_enabled": set_grad_enabled,
        "inference_mode": inference,
        "gradient_penalty": gradient_penalty,
        "bool": each(lambda x: x if (x[0] - x[1]).relu() else -x),
        "type-name": lambda z: z if z.type().startswith("torch") else -z,
        "to-float": lambda z: z.to(torch.float64),
        "randn_like": lambda z: z + z * torch.randn_like(z),
    },
    crosses=False,
)


# --- weights, detached or moved by themselves; buffers ----------------------------------------


class Scaled(nn.Module):
    """A weight scaled by a detached statistic of its own, as in quantisation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(ROW[1], 4)

    def forward(self, z):
        weight = self.linear.weight
        if self.how == "detach":
            scale = weight.detach().abs().amax(1)
        elif self.how == "data":
            scale = weight.data.square().sum(1)
        else:
            with torch.no_grad():
                scale = weight[:, 0]  # a view of the weight itself
        return self.linear(z) * scale


class Averaged(nn.Module):
    """Reads a moving average, and then moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(ROW[1]))

    def forward(self, z):
        y = (z - self.mean).tanh() * z
        with torch.no_grad():
            self.mean.mul_(0.5).add_(z.mean(0), alpha=0.5)
        return y * (1 + self.mean)


class Padded(nn.Module):
    """An embedding with a padding row, whose weight may also be the decoder's; ``direct`` as
    exported models look it up.
    """

    def __init__(self, tied: bool, padding: int = 2, direct: bool = False) -> None:
        super().__init__()
        self.embedding, self.tied = nn.Embedding(5, 4, padding_idx=padding), tied
        self.direct = direct
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, z):
        ids, table = torch.tensor([0, 2, 4, 2, 3, 1]), self.embedding
        padding = table.padding_idx
        y = torch.ops.aten.embedding(table.weight, ids, padding) if self.direct else table(ids)
        y = y.tanh()
        return y @ self.embedding.weight.t() * z[:, :1] if self.tied else y * z[:, :4]


class TiedWeights(nn.Module):
    """One weight under two names, and once more transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.again = nn.Linear(ROW[1], 30), nn.Linear(ROW[1], 30)
        self.again.weight = self.down.weight

    def forward(self, z):
        return F.linear(self.down(z).relu() + self.again(z.tanh()), self.down.weight.t())


linear = lambda: nn.Linear(ROW[1], 4)
add(
    {
        "weight-detach": Scaled("detach"),
        "weight-data": Scaled("data"),
        "padding_idx": Padded(tied=False),
        "padding_idx-negative": Padded(tied=False, padding=-1),
        "padding_idx-tied": Padded(tied=True),
        "padding_idx-exported": Padded(tied=True, direct=True),
        "tied-weights": TiedWeights(),
    }
)
add(
    {
        "weight-view": Scaled("no_grad"),
        "moving-average": Averaged(),
        "spectral_norm": parametrizations.spectral_norm(linear()),
        "spectral_norm-hook": nn.utils.spectral_norm(linear()),
        "weight_norm": parametrizations.weight_norm(linear()),
        "batch_norm": nn.BatchNorm1d(ROW[1]),
        "dropout": nn.Dropout(0.4),
    },
    crosses=False,
)
