"""Dropout behind a replayed max-pooling of images with the channels last: a constant mask, in every
form, estimator and curvature, in measuring, checking and activation checkpoints.
"""

import pytest
import torch
import torch.nn.functional as F
from formats import SEED, Net, images
from reference import gradient, relative
from stepping import Drawn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seht


class Mask(nn.Module):
    """Dropout with a mask that is known."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.mask = mask

    def forward(self, h: Tensor) -> Tensor:
        return h * self.mask[: len(h)]  # measuring looks at a part of the batch, too


def pooling(*, known: bool, dtype=torch.float64):
    """A network on images with the channels last; its dropout, or the mask of its next pass."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(128, 5),
    ).to(dtype)  # fmt: skip
    x = torch.randn(16, 3, 8, 8, dtype=dtype).to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    if known:
        h = model[:3](x).detach()
        model[3] = Mask(model[3](torch.ones_like(h)))  # in the memory format of h
        torch.manual_seed(3)
    y = torch.arange(16) % 5
    return model, lambda: F.cross_entropy(model(x), y), (x, y)


def step(form: str, *, known: bool, **options):
    model, closure, _ = pooling(known=known)
    penalty = seht.HessianTrace(model, weight=0.1, seed=SEED, **options)
    if form == "scalar":
        penalty(closure).backward()
    else:
        penalty.backward(closure)
    return penalty.last, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"curvature": "ggn"},
        {"estimator": "seht-s"},
        {"estimator": "seht-s", "curvature": "ggn"},
        {"estimator": Drawn(1)},
    ],
    ids=["hessian", "ggn", "seht-s", "seht-s-ggn", "prefix"],
)
def test_dropout_is_a_constant_mask(form, options):
    last, g = step(form, known=False, **options)
    known, wanted = step(form, known=True, **options)
    assert last.loss == pytest.approx(known.loss, rel=1e-12)
    assert last.trace == pytest.approx(known.trace, rel=1e-8)
    assert relative(g, wanted) < 1e-7


def seeded(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    torch.manual_seed(3)
    return F.cross_entropy(net(batch[0]), batch[1])


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_measuring_in_train_mode(curvature):
    found = []
    for known in (False, True):
        model, _, batch = pooling(known=known)
        model.train()
        found.append(seht.measure.trace(model, seeded, [batch], seed=SEED, curvature=curvature))
    assert found[0].estimate == pytest.approx(found[1].estimate, rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_an_activation_checkpoint(reentrant):
    def build(again: bool):
        part = nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.3))
        change = (lambda h: checkpoint(part, h, use_reentrant=reentrant)) if again else part
        return images(lambda: Net(nn.Conv2d(3, 8, 3, padding=1), change, nn.Identity()))

    model, closure, leaves = build(again=False)
    expected = seht.hessian_trace(model, closure, seed=SEED, engine="autograd")
    wanted = gradient(expected, leaves)
    model, closure, leaves = build(again=True)
    trace = seht.hessian_trace(model, closure, seed=SEED, engine="difference")
    assert trace.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(gradient(trace, leaves), wanted) < 5e-6


def test_the_check_trusts_it():
    model, _, batch = pooling(known=False, dtype=torch.float32)
    report = seht.check(model, lambda net, b: F.cross_entropy(net(b[0]), b[1]), batch)
    assert str(report).count("can be trusted") == 2
