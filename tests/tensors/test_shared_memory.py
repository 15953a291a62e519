"""Two parameters in one memory: refused wherever a trace is taken, with the way out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht import measure


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def assigned():
    model = Pair().double()
    model.b.weight.data = model.a.weight.data
    return model


def overlapping():
    model = Pair().double()
    whole = torch.randn(6, 4, dtype=torch.float64)
    model.a.weight.data, model.b.weight.data = whole[:4], whole[2:]
    return model


def frozen():
    model = assigned()
    model.a.weight.requires_grad_(False)
    return model


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(6) % 4


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


WAYS = {
    "penalty": lambda m: seht.HessianTrace(m, weight=0.1),
    "hessian_trace": lambda m: seht.hessian_trace(m, lambda: loss_fn(m, (X, Y))),
    "autograd": lambda m: seht.hessian_trace(m, lambda: loss_fn(m, (X, Y)), engine="autograd"),
    "exact": lambda m: seht.exact_trace(m, lambda: loss_fn(m, (X, Y))),
    "check": lambda m: seht.check(m, loss_fn, (X, Y)),
    "measure": lambda m: measure.trace(m, loss_fn, [(X, Y)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [assigned, overlapping, frozen], ids=lambda f: f.__name__)
def test_refused(way, make):
    with pytest.raises(ValueError, match=r"'a.weight' and 'b.weight' share their memory") as told:
        WAYS[way](make())
    fix = "model.b.weight.data.clone()" if make is overlapping else "model.b.weight = model.a.weig"
    assert fix in str(told.value)
    assert "\n" not in str(told.value)


def test_the_way_out_is_one():
    """Tied, both engines find the trace of one tensor."""
    model = assigned()
    model.b.weight = model.a.weight
    found = [
        seht.hessian_trace(model, lambda: loss_fn(model, (X, Y)), engine=engine, seed=3).item()
        for engine in ("autograd", "difference")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_shared_after_the_first_step():
    model = Pair().double()
    penalty = seht.HessianTrace(model, weight=0.1)
    penalty(lambda: loss_fn(model, (X, Y)))
    model.b.weight.data = model.a.weight.data
    with pytest.raises(ValueError, match="share their memory"):
        penalty(lambda: loss_fn(model, (X, Y)))


def test_one_storage_is_no_harm():
    """Rows of a flat buffer, columns that lie between each other, and a copy of a tied model."""
    model, whole = Pair().double(), torch.randn(8, 4, dtype=torch.float64)
    model.a.weight.data, model.b.weight.data = whole[:4], whole[4:]
    seht.hessian_trace(model, lambda: loss_fn(model, (X, Y)))
    whole = torch.randn(4, 8, dtype=torch.float64)
    model.a.weight.data, model.b.weight.data = whole[:, ::2], whole[:, 1::2]
    seht.hessian_trace(model, lambda: loss_fn(model, (X, Y)))
    model.b.weight = model.a.weight
    copied = copy.deepcopy(model)
    seht.hessian_trace(copied, lambda: loss_fn(copied, (X, Y)))


def test_what_is_not_probed_may_share():
    model = Pair().double()
    model.b.bias.data = model.a.bias.data
    seht.hessian_trace(model, lambda: loss_fn(model, (X, Y)))
    with pytest.raises(ValueError, match=r"'a.bias' and 'b.bias'"):
        seht.hessian_trace(model, lambda: loss_fn(model, (X, Y)), params="*")


def test_another_module_on_the_same_memory():
    """Not the model's own, and in the loss all the same."""
    model, other = Pair().double(), nn.Linear(4, 4).double()
    other.weight.data = model.a.weight.data
    with pytest.raises(ValueError, match=r"'a.weight' and another tensor .* share their memory"):
        seht.hessian_trace(model, lambda: loss_fn(model, (other(X), Y)))
    with torch.no_grad():
        other.weight.data = other.weight.data.clone()
    seht.hessian_trace(model, lambda: loss_fn(model, (other(X), Y)))
