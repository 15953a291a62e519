"""A random mask is the same in every pass, however the tensors before it lie in memory.

Random numbers are drawn in the order of memory: a replayed result with other strides than the
centre's gives the dropout behind it another mask.
"""

import pytest
import torch
import torch.nn.functional as F
from formats import SEED, Draw, Net, assert_engines_agree, images
from reference import gradient, relative
from torch import Tensor, nn

import seht
from seht.tensors.memory import laid_out, layout_of

# --- every replayed result lies in memory as the centre's --------------------------------------

LINES = {
    "max_pool1d": lambda h: F.max_pool1d(h, 2),
    "max_pool1d-indices": lambda h: F.max_pool1d(h, 2, return_indices=True)[0],
    "adaptive_max_pool1d": lambda h: F.adaptive_max_pool1d(h, 3),
    "sort": lambda h: h.sort(1).values,
    "sort-last": lambda h: h.sort().values,
    "topk": lambda h: h.topk(3, 1).values,
    "kthvalue": lambda h: h.kthvalue(2, 1, keepdim=True).values * h,
    "max": lambda h: h.max(1).values,
    "max-keepdim": lambda h: h.max(0, keepdim=True).values + h,
    "median": lambda h: h.median(2).values,
    "mode": lambda h: h.mode(1).values,
    "cummax": lambda h: h.cummax(1).values,
    "amax": lambda h: h.amax(2),
    "maximum-broadcast": lambda h: torch.maximum(h[:, :, :1], h),
    "minimum-broadcast": lambda h: torch.minimum(h[:, :1], h),
    "maximum-layouts": lambda h: torch.maximum(h, h.contiguous().flip(1)),
    "clamp": lambda h: h.clamp(-0.5, 0.5),
    "clamp-bounds": lambda h: torch.clamp(h, h[:, :1] - 1, h.contiguous() + 0.5),
    "abs": torch.abs,
    "relu": torch.relu,
    "relu-inplace": lambda h: F.relu((1 * h), inplace=True),
    "leaky_relu": F.leaky_relu,
    "rrelu": lambda h: F.rrelu(h, training=True),
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "softsign": F.softsign,
    "round": lambda h: h + h.round(),
    "normalize": lambda h: F.normalize(h, p=1, dim=1),
    "norm": lambda h: h.norm(p=1, dim=1),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "detach": lambda h: h + torch.dropout(h.detach(), 0.5, True),
    "detach-expanded": lambda h: h + torch.dropout(h[:, :1].expand_as(h).detach(), 0.5, True),
    "detach-sliced": lambda h: h[:, ::2] + torch.dropout(h[:, ::2].detach(), 0.5, True),
    "no_grad": lambda h: h + F.dropout(torch.no_grad()(lambda z: z.sort(1).values.abs())(h)),
    "view": lambda h: F.max_pool1d(h, 1).transpose(1, 2).view(h.shape[0], -1),
}
IMAGES = {
    "max_pool2d": lambda h: F.max_pool2d(h, 2),
    "max_pool2d-padding": lambda h: F.max_pool2d(h, 3, 2, 1),
    "max_pool2d-indices": lambda h: F.max_pool2d(h, 2, return_indices=True)[0],
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(h, 3),
    "adaptive_max_pool2d-1": lambda h: F.adaptive_max_pool2d(h, 1),
    "fractional_max_pool2d": lambda h: F.fractional_max_pool2d(h, 2, output_size=3),
    "prelu": nn.PReLU(8, init=0.3),
    "view": lambda h: F.max_pool2d(h, 2).permute(0, 2, 3, 1).view(h.shape[0], -1),
}
VOLUMES = {
    "max_pool3d": lambda h: F.max_pool3d(h, 2),
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(h, 2),
}


class Turned(nn.Linear):
    """What it returns is transposed: (batch, features, positions)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


@pytest.mark.parametrize("name", LINES)
def test_behind_a_transposed_tensor(name):
    net = lambda: Net(Turned(3, 7), LINES[name], nn.Dropout(0.4))
    assert_engines_agree(lambda: images(net, (4, 6, 3)))


@pytest.mark.parametrize("name", IMAGES)
def test_behind_an_image_with_its_channels_last(name):
    conv = lambda: nn.Conv2d(3, 8, 3, padding=1)
    assert_engines_agree(lambda: images(lambda: Net(conv(), IMAGES[name], nn.Dropout(0.3))))


@pytest.mark.parametrize("name", VOLUMES)
def test_behind_a_volume_with_its_channels_last(name):
    conv = lambda: nn.Conv3d(2, 4, 3, padding=1)
    net = lambda: Net(conv(), VOLUMES[name], nn.Dropout(0.3))
    assert_engines_agree(lambda: images(net, (3, 2, 4, 4, 4)))


# --- every function that draws -----------------------------------------------------------------


def attention(h: Tensor) -> Tensor:
    q = h.flatten(2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


def shuffled(h: Tensor) -> Tensor:
    rows = torch.softmax(torch.zeros_like(h).flatten(1), 1)
    return h.flatten(1).gather(1, torch.multinomial(rows, 9))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(9, 4, 2, dropout=0.4, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.lstm(h.flatten(2))[0]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.MultiheadAttention(9, 3, dropout=0.4, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        q = h.flatten(2)
        return self.heads(q, q, q, need_weights=True)[0]


DRAWS = {
    "dropout": F.dropout,
    "dropout-inplace": lambda h: F.dropout(h, 0.5, inplace=True),
    "torch.dropout": lambda h: torch.dropout(h, 0.5, True),
    "dropout1d": lambda h: F.dropout1d(h.flatten(2)),
    "dropout2d": F.dropout2d,
    "dropout3d": lambda h: F.dropout3d(h.unsqueeze(-1)),
    "alpha_dropout": lambda h: F.alpha_dropout(h, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, training=True),
    "native_dropout": lambda h: torch.native_dropout(h, 0.5, True)[0],
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "bernoulli-of-weights": lambda h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(),
    "normal_": lambda h: h + torch.zeros_like(h).normal_(),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h + torch.randn_like(h),
    "randint_like": lambda h: h * torch.randint_like(h, 3),
    "normal": lambda h: torch.normal(h, 1.0),
    "multinomial": shuffled,
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "attention": attention,
    "recurrent": Recurrent,
    "heads": Heads,
}


def drawing(name: str) -> nn.Module:
    function = DRAWS[name]
    return function() if isinstance(function, type) else Draw(function)


@pytest.mark.parametrize("name", DRAWS)
def test_every_function_that_draws(name):
    def net():
        pooled = lambda h: F.max_pool2d(h, 2)
        return Net(nn.Conv2d(3, 8, 3, padding=1), pooled, drawing(name))

    assert_engines_agree(lambda: images(net))


BLIND = ("bernoulli", "bernoulli_")
"""They draw from a constant that is made in between."""


def turning(name: str, engine: str):
    """A model part of which returns another layout in every run but the first."""
    runs = []

    class Turning(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            runs.append(1)
            form = torch.channels_last if len(runs) > 1 else torch.contiguous_format
            with torch._C.DisableTorchFunction():
                return h.contiguous(memory_format=form)

    net = lambda: Net(nn.Conv2d(3, 8, 3, padding=1), Turning(), drawing(name))
    model, closure, leaves = images(net, (4, 3, 3, 3))
    runs.clear()
    trace = seht.hessian_trace(model, closure, seed=SEED, engine=engine)
    return trace.item(), gradient(trace, leaves)


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in BLIND])
def test_a_mask_behind_code_that_changes_the_layout(name):
    """Compiled code may: what is drawn from is laid out anew."""
    (value, g), (ours, our_g) = (turning(name, e) for e in ("autograd", "difference"))
    assert ours == pytest.approx(value, rel=1e-5)
    assert relative(our_g, g) < 5e-6


@pytest.mark.parametrize("name", BLIND)
def test_a_mask_that_would_be_another_is_refused(name):
    with pytest.raises(seht.UnrepeatableError, match=f"{name} was given another argument"):
        turning(name, "difference")


# --- the parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "known",
    [
        torch.zeros(3, 4, 5).transpose(0, 2),
        torch.zeros(3, 8, 5)[:, ::2],
        torch.zeros(3, 1, 5).expand(3, 4, 5),
        torch.zeros(()),
        torch.zeros(3, 0, 5).transpose(0, 1),
        torch.zeros(2, 4, 1, 1).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "sliced", "expanded", "number", "empty", "points"],
)
def test_a_layout_is_taken_over(known):
    values = torch.arange(float(known.numel())).view(known.shape)
    values = values[:, :1].expand_as(known).clone() if 0 in known.stride() else values
    moved = laid_out(values, layout_of(known))
    assert moved.stride() == known.stride()
    assert torch.equal(moved, values)
    assert laid_out(moved, layout_of(known)) is moved


def test_what_overlaps_stays_as_it_is():
    values = torch.arange(6.0).view(3, 2)
    assert laid_out(values, layout_of(torch.zeros(4).unfold(0, 2, 1))) is values
    known = values.requires_grad_() * 1
    assert laid_out(known, (0, 1)) is known
