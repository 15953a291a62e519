"""What stands for a fused operator lies in memory as its result would: strides, views, dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.operators.safe_forms import safe_ops


def formats(shape):
    """The same numbers in every way they may lie in memory."""
    x = torch.randn(shape)
    yield "contiguous", x
    if len(shape) == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
    if len(shape) == 5:
        yield "channels_last_3d", x.contiguous(memory_format=torch.channels_last_3d)
    last = len(shape) - 1
    yield "transposed", x.transpose(1, last).contiguous().transpose(1, last)
    yield "reversed", x.permute(*range(last, -1, -1)).contiguous().permute(*range(last, -1, -1))
    yield "sliced", torch.cat([x, x], last)[..., : shape[-1]]
    yield "expanded", x[:1].expand(shape)


aten = torch.ops.aten
STATS = [torch.zeros(6), torch.ones(6)]
GAIN = [torch.rand(6), torch.rand(6)]
EVERY = [(5, 6, 4, 3), (5, 6, 4), (5, 6, 2, 3, 2)]
NORMS = {
    "batch": (lambda x: F.batch_norm(x, None, None, *GAIN, True), [(5, 6), *EVERY]),
    "batch-eval": (lambda x: F.batch_norm(x, *STATS, *GAIN), [(5, 6), *EVERY]),
    "native_batch": (
        lambda x: aten.native_batch_norm(x, *GAIN, None, None, True, 0.1, 1e-5)[0],
        EVERY,
    ),
    "legit": (lambda x: aten._native_batch_norm_legit(x, None, None, True, 0.1, 1e-5)[0], EVERY),
    "instance": (lambda x: F.instance_norm(x, weight=GAIN[0]), EVERY),
    "instance-eval": (lambda x: F.instance_norm(x, *STATS, use_input_stats=False), EVERY),
    "layer": (lambda x: F.layer_norm(x, x.shape[-1:]), [(5, 6), *EVERY]),
    "layers": (lambda x: F.layer_norm(x, x.shape[1:], x[0].contiguous()), EVERY),
    "native_layer": (
        lambda x: aten.native_layer_norm.default(x, x.shape[-1:], None, None, 1e-5)[0],
        EVERY,
    ),
    "weight": (lambda x: torch._weight_norm(x, torch.ones_like(x[:, :1, :1]), 0), [(5, 6, 4)]),
    "hardsigmoid": (F.hardsigmoid, [(5, 6), *EVERY]),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        [(5, 6, 4, 3), (5, 6, 4)],
    ),
    "attention-dropout": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        [(5, 6, 4, 3)],
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_result_has_the_strides_of_the_fused_one(name):
    function, shapes = NORMS[name]
    for shape in shapes:
        for kind, x in formats(shape):
            x = x.detach().requires_grad_()
            torch.manual_seed(5)
            plain, drawn = function(x), torch.get_rng_state()
            torch.manual_seed(5)
            with safe_ops():
                safe = function(x)
            assert safe.stride() == plain.stride(), (kind, shape)
            torch.testing.assert_close(safe, plain, rtol=1e-5, atol=1e-5)
            assert torch.equal(torch.get_rng_state(), drawn)


class Heads(nn.Module):
    """Attention as many write it: the kernel's result, taken apart by ``view``."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).view(x.shape)


class Swapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).view(x.shape[0], -1)


def images():
    return torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)


BEHIND = {
    "layer norm of a transposed sequence": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), Swapped(nn.LayerNorm(4))),
        lambda: torch.randn(5, 3, 8),
    ),
    "batch norm of channels_last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        images,
    ),
    "batch norm of a transposed sequence": (
        lambda: nn.Sequential(nn.Linear(3, 4), Swapped(nn.BatchNorm1d(4))),
        lambda: torch.randn(5, 6, 3),
    ),
    "instance norm of channels_last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)),
        images,
    ),
    "attention": (Heads, lambda: torch.randn(4, 5, 6)),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("engine", ["autograd", "difference"])
def test_dropout_and_views_behind_an_operator(name, engine):
    """The loss is the plain one: the same mask is drawn, and a view finds its strides."""
    build, data = BEHIND[name]
    torch.manual_seed(1)
    model = nn.Sequential(build(), nn.Dropout(0.5)).double()
    x = data().double()
    closure = lambda: model(x).square().mean()
    torch.manual_seed(2)
    plain = closure()
    penalty = seht.HessianTrace(model, weight=0.1, engine=engine)
    torch.manual_seed(2)
    penalty(closure)
    assert penalty.last.loss == pytest.approx(plain.item(), rel=1e-12)
