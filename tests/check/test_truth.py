"""The numerical truth against formulas, and what it says when there is none."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seht.check.sandbox import Sandbox, copied, copy_model
from seht.check.truth import Inconclusive, asymmetry, measure

NEED = 2.5e-4
START = torch.randn(3, 4, generator=torch.Generator().manual_seed(7)).double()


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(START.clone())
        self.b = nn.Parameter(torch.tensor([0.5, -0.3]).double())


def sandbox(loss, model=None):
    return Sandbox(model or Weights(), lambda model, batch: loss(model), None, None, 0)


def test_against_a_formula():
    """L = sum w^4 + (sum w)^3 + b0 sum w^2, so that H, t and its gradient can be written down."""

    def loss(m):
        return m.w.pow(4).sum() + m.w.sum().pow(3) + m.b[0] * m.w.square().sum()

    box = sandbox(loss)
    truth = measure(box, 5, NEED)
    w, b = box.model.w.detach(), box.model.b.detach()
    s = next(box.task(5).probes())["w"].double()
    t = (12 * w**2).sum() + 6 * w.sum() * s.sum() ** 2 + 2 * b[0] * w.numel()
    gradient = 24 * w + 6 * s.sum() ** 2
    assert truth.trace.value.item() == pytest.approx(t.item(), rel=1e-8)
    torch.testing.assert_close(truth.parts["w"].value, gradient.flatten(), rtol=1e-5, atol=1e-4)
    expected = torch.tensor([2.0 * w.numel(), 0.0]).double()
    torch.testing.assert_close(truth.parts["b"].value, expected, rtol=1e-5, atol=1e-4)
    assert truth.noise < 1e-5
    assert truth.loss == pytest.approx(loss(box.model).item())
    assert truth.trace.error(truth.trace.value * 1.5) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("sharpness", [1.0, 1e2, 1e4])
def test_the_step_adapts_to_the_curvature(sharpness):
    box = sandbox(lambda m: (sharpness * m.w).sin().sum())
    truth = measure(box, 1, NEED)
    w = box.model.w.detach()
    expected = -(sharpness**3) * (sharpness * w).cos()
    assert (truth.parts["w"].value - expected.flatten()).norm() < NEED * expected.norm()


def test_a_vanishing_third_derivative_is_known_to_vanish():
    truth = measure(sandbox(lambda m: (m.w.sum(0) - 1).square().sum()), 2, NEED)
    assert truth.whole.vanishes(NEED) and not truth.trace.vanishes(NEED)
    assert truth.noise < NEED


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m: m.w.sum(), "vanish"),
        (lambda m: F.elu(m.w - START).sum(), "no two step sizes agree"),
        (lambda m: (m.w - START).square().pow(0.8).sum(), "not finite"),
        (lambda m: m.w.sin().sum() * (1 + next(COUNTER)), "cannot be repeated"),
    ],
    ids=["linear", "kink at the weights", "pole at the weights", "state"],
)
def test_where_there_is_no_truth(loss, words):
    with pytest.raises(Inconclusive, match=words):
        measure(sandbox(loss), 3, NEED)


COUNTER = iter(range(10**6))


def test_asymmetry():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    def loss(twist):
        def compute(m):
            first = Half.apply(m.w) if twist else m.w
            return (first[:2].sum() * m.w[2:].sum()).sin()

        return compute

    for twist, low, high in ((False, 0.0, 1e-6), (True, 1e-2, math.inf)):
        box = sandbox(loss(twist))
        assert low <= asymmetry(box, measure(box, 4, NEED), 9) <= high


# --- the sandbox ------------------------------------------------------------------------------


def test_weights_come_back_after_an_evaluation_and_after_a_failure():
    box = sandbox(lambda m: m.w.pow(3).sum())
    before = box.model.w.detach().clone()
    box.gradient({"w": torch.ones(3, 4).double()}, 0.5)
    assert torch.equal(box.model.w, before)
    box.loss_fn = lambda model, batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        box.gradient({"w": torch.ones(3, 4).double()}, 0.5)
    assert torch.equal(box.model.w, before)


def test_nearby_is_another_model_without_zeros():
    model = Weights()
    nn.init.zeros_(model.w)
    box = sandbox(lambda m: m.w.pow(3).sum(), model)
    aside = box.nearby()
    assert aside.model is not model and (model.w == 0).all()
    assert (aside.model.w != 0).all()
    step = (aside.model.b - model.b).abs()
    assert (step > 0).all() and (step < 0.1).all()


def test_copies_of_batches():
    from collections import OrderedDict, namedtuple

    Pair = namedtuple("Pair", "x y")
    x = torch.ones(2, requires_grad=True)
    batch = {
        "a": Pair(x, torch.arange(2)),
        "b": [(x.half(), None)],
        "c": OrderedDict(d="text", e=3),
    }
    out = copied(batch)
    assert out["a"].x.dtype == torch.float64 and out["a"].x.requires_grad and out["a"].x.is_leaf
    assert out["a"].y.dtype == torch.int64 and out["a"].y is not batch["a"].y
    assert type(out["a"]) is Pair and type(out["c"]) is OrderedDict
    assert out["b"][0][0].dtype == torch.float64 and out["b"][0][1] is None
    assert out["c"] == {"d": "text", "e": 3}
    assert copied(torch.ones(2, dtype=torch.complex64)).dtype == torch.complex128


def test_models_with_a_result_kept_from_an_earlier_pass_can_be_copied():
    model = nn.Linear(2, 2)
    model.cache = model(torch.ones(1, 2))
    copied = copy_model(model)
    assert copied.weight.dtype == torch.float64 and not copied.cache.requires_grad
