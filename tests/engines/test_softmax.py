"""Cross-entropy's curvature written out, against three derivatives of the loss."""

import pytest
import torch
import torch.nn.functional as F

import seht
from seht.curvature.output_curvature import Curvature
from seht.curvature.softmax import SoftmaxCurvature

FLAT, DEEP = (6, 5), (3, 4, 5)


def labels(count):
    return torch.arange(count) % 5


def ignoring(z, index=-100):
    y = labels(6)
    y[2] = index
    return F.cross_entropy(z, y, ignore_index=index)


MATCHED = {
    "plain": (FLAT, lambda z: F.cross_entropy(z, labels(6))),
    "sum": (FLAT, lambda z: F.cross_entropy(z, labels(6), reduction="sum")),
    "ignored": (FLAT, ignoring),
    "ignored, no class": (FLAT, lambda z: ignoring(z, 255)),
    "ignore_index": (FLAT, lambda z: F.cross_entropy(z, labels(6), ignore_index=3)),
    "flattened": (DEEP, lambda z: F.cross_entropy(z.view(-1, 5), labels(12))),
    "reshaped": (DEEP, lambda z: F.cross_entropy(z.reshape(-1, 5), labels(12))),
    "in two steps": (FLAT, lambda z: F.nll_loss(z.log_softmax(-1), labels(6))),
}
OTHERS = {
    "smoothed": (FLAT, lambda z: F.cross_entropy(z, labels(6), label_smoothing=0.1)),
    "weighted": (FLAT, lambda z: F.cross_entropy(z, labels(6), weight=torch.ones(5).double())),
    "soft labels": (FLAT, lambda z: F.cross_entropy(z, torch.full((6, 5), 0.2).double())),
    "scaled": (FLAT, lambda z: 2 * F.cross_entropy(z, labels(6))),
    "warmer": (FLAT, lambda z: F.cross_entropy(z / 2, labels(6))),
    "transposed": (DEEP, lambda z: F.cross_entropy(z.transpose(0, 1).reshape(-1, 5), labels(12))),
    "pixels": ((3, 5, 4), lambda z: F.cross_entropy(z, labels(12).view(3, 4))),
    "squared": (FLAT, lambda z: z.square().mean()),
}


def outputs(shape, leaf=True):
    z = torch.randn(shape).double().requires_grad_()
    return z if leaf else z.clone()


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("name", MATCHED)
def test_written_out(name, leaf):
    shape, function = MATCHED[name]
    z, beside = outputs(shape, leaf), outputs((2,), leaf)
    d = [torch.randn(shape).double(), torch.randn(2).double()]
    loss = function(z)
    ours = Curvature(loss, [z, beside])
    assert ours._softmax is not None
    found = ours.along(d)
    (g,) = torch.autograd.grad(loss, z, create_graph=True)
    (h,) = torch.autograd.grad((g * d[0]).sum(), z, create_graph=True)
    q = (h * d[0]).sum()
    (third,) = torch.autograd.grad(q, z)
    torch.testing.assert_close(found.value, q.detach())
    torch.testing.assert_close(found.product, [h.detach(), torch.zeros(2).double()])
    torch.testing.assert_close(found.third, [third, torch.zeros(2).double()])
    torch.testing.assert_close(ours.slopes(), [g.detach(), torch.zeros(2).double()])


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_goes_the_general_way(name):
    shape, function = OTHERS[name]
    z = outputs(shape)
    assert SoftmaxCurvature.match(function(z), [z]) is None


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_the_penalty_takes_it(form, monkeypatch):
    """Value and gradient are those of the general way."""
    found = []
    for general in (False, True):
        if general:
            monkeypatch.setattr(SoftmaxCurvature, "match", classmethod(lambda *_: None))
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
        model.double()
        x = torch.randn(6, 4).double()
        penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", seed=0)
        closure = lambda: F.cross_entropy(model(x), labels(6))
        if form == "lean":
            penalty.backward(closure)
        else:
            penalty(closure).backward()
        found.append([torch.tensor(penalty.last.trace), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
