"""Masks in bits, and probes drawn again: less memory in the lean form, and the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from stepping import FORMS, assert_gradients, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import seht
from seht.estimators import SehtD, SehtH
from seht.operators import bits
from seht.task import Task

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
}


def entries(layout="contiguous"):
    torch.manual_seed(0)
    return LAYOUTS[layout](torch.randn(16, 16, 16, 16, dtype=torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask_survives_and_autograd_keeps_its_bits_alone(layout, in_place):
    x = entries(layout)
    mask = x > 0
    packed = bits.pack(mask)
    assert packed[0].numel() * 8 == mask.numel()
    assert torch.equal(bits.unpack(packed, x.dtype), mask.double())

    leaf = x.clone().requires_grad_()
    y = bits.Masked.apply(leaf * 1, packed, in_place)
    assert y.stride() == x.stride()
    assert y.grad_fn.packed is packed and not y.grad_fn.saved_tensors
    y.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * x * mask)


def test_what_is_not_worth_it_stays_bytes():
    assert bits.pack(torch.ones(8, dtype=torch.bool)) is None
    assert bits.pack(torch.ones(bits._FEWEST + 1, dtype=torch.bool)) is None
    assert bits.pack(torch.ones(2 * bits._FEWEST, dtype=torch.bool)[::2]) is None
    many = torch.ones(2, bits._FEWEST, dtype=torch.bool)
    assert torch.vmap(lambda row: torch.tensor(bits.pack(row) is None))(many).all()


class Net(nn.Module):
    def __init__(self, in_place=False, again=False):
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 4, 3)
        self.relu, self.again, self.head = nn.ReLU(in_place), again, nn.Linear(4, 3)

    def front(self, x):
        return self.relu(self.two(self.relu(self.one(x))))

    def forward(self, x):
        y = checkpoint(self.front, x, use_reentrant=False) if self.again else self.front(x)
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize(("in_place", "again"), [(False, False), (True, False), (False, True)])
def test_the_lean_form_agrees_with_the_other(curvature, layout, in_place, again, monkeypatch):
    x, y = entries(layout), torch.arange(16) % 3
    calls = []
    counted = staticmethod(_counting(bits.Masked.forward, calls))
    monkeypatch.setattr(bits.Masked, "forward", counted)
    found = {}
    for form in FORMS:
        torch.manual_seed(1)
        model = Net(in_place, again).double()
        if layout == "channels last":
            model.to(memory_format=torch.channels_last)
        penalty = seht.HessianTrace(model, weight=0.1, curvature=curvature, seed=2)
        closure = lambda: F.cross_entropy(model(x), y)
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        found[form] = gradients(model.parameters()), penalty.last.trace
    assert calls  # or the lean form has kept bytes, and nothing was tried
    assert_gradients(found["lean"][0], found["scalar"][0], rtol=1e-5)  # rounding over e^2
    assert found["lean"][1] == pytest.approx(found["scalar"][1], rel=1e-9)


def _counting(function, calls):
    def counted(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return counted


def task(estimator):
    model = nn.Linear(600, 500)
    weights = dict(model.named_parameters())
    return Task(model, (), lambda: None, weights, (0, 1), frozenset(), 2, estimator, seed=5)


def test_a_probe_that_is_not_kept_is_the_same_each_time():
    kept = list(task(SehtH(probes=2)).probes())  # 300,000 weights, and a bias of 500
    frugal = list(task(SehtH(probes=2)).probes(frugal=True))
    for one, other in zip(kept, frugal, strict=True):
        assert list(other) == ["bias"] and other.seeds == one.seeds
        for name, part in one.items():
            assert torch.equal(other[name], part) and torch.equal(other[name], part)


@pytest.mark.parametrize("estimator", [SehtD(), SehtH(distribution="gaussian")])
def test_probes_that_are_slow_to_draw_are_kept(estimator):
    [probe] = task(estimator).probes(frugal=True)
    assert len(probe) == 2
