"""Shortened products are off around the passes, and as the user left them elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from helpers import every_engine
from lowprecision import every_curvature, images, net
from stepping import FORMS, WEIGHT, assert_gradients, gradients
from torch import nn

import seht
from seht.precision.policy import shortened
from seht.tensors.process import unshortened


def flags():
    found = [torch._C._get_fp32_precision_getter(b, o) for b, o in PLACES]
    try:
        return [
            *found,
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        ]
    except RuntimeError:  # PyTorch's two ways were mixed
        return found


PLACES = [(b, o) for b in ("cuda", "mkldnn") for o in ("matmul", "conv", "rnn")]


@pytest.fixture
def tf32():
    """Settings are the process's."""
    yield
    for place in PLACES:
        torch._C._set_fp32_precision_setter(*place, "ieee")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def new_way():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


WAYS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "cublas": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "new": new_way,
}


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="one way only")
@every_engine
@pytest.mark.parametrize("way", WAYS)
def test_tf32_is_off_around_the_passes(tf32, engine, way):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    WAYS[way]()
    before, seen = flags(), []

    def closure(fail=False):
        seen.append(shortened({"cpu", "cuda"}))
        if fail:
            raise ArithmeticError
        return F.cross_entropy(model(x), y)

    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    penalty(closure).backward()
    assert flags() == before
    with pytest.raises(ArithmeticError):
        penalty(lambda: closure(fail=True))
    assert flags() == before
    assert set(seen) == {None}


class Flagged(torch.autograd.Function):
    """Notes in which surroundings it is differentiated."""

    seen: list[object]

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        Flagged.seen.append(shortened({"cpu"}))
        return g


@every_curvature
def test_shortened_products_do_not_reach_the_users_backward(tf32, curvature):
    """On the CPU, "medium" stands for bfloat16, where the machine has it."""

    def train():
        Flagged.seen = []
        model = net()
        closure = lambda: F.cross_entropy(Flagged.apply(model(images()[0])), images()[1])
        loss = seht.HessianTrace(model, weight=WEIGHT, seed=1, curvature=curvature)(closure)
        inside = len(Flagged.seen)
        loss.backward()
        assert len(Flagged.seen) == inside + 1
        return gradients(model.parameters())

    wanted = train()
    torch.set_float32_matmul_precision("medium")
    got = train()
    assert set(Flagged.seen) == {None}
    assert_gradients(got, wanted, rtol=3e-3)
    with unshortened():
        assert shortened({"cpu", "cuda"}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_tf32_on_a_card(form, curvature, tf32):
    found = []
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
        model = net().cuda()
        x, y = (t.cuda() for t in images())
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1, curvature=curvature)
        closure = lambda: F.cross_entropy(model(x), y)
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        found.append(gradients(model.parameters()))
    assert_gradients(found[1], found[0], rtol=5e-3)


@every_engine
def test_after_global_flags_were_disabled(tf32, engine, monkeypatch):
    """``torch.backends.disable_global_flags()`` forbids assignments that are not taken back."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3).double(), torch.arange(6) % 2
    closure = lambda: F.cross_entropy(model(x), y)
    expected = seht.hessian_trace(model, closure, seed=1, engine=engine).item()
    disable = torch.backends.disable_global_flags
    with monkeypatch.context() as patch:  # it has no counterpart
        patch.setitem(disable.__globals__, "__allow_nonbracketed_mutation_flag", False)
        before = flags()
        assert torch.backends.flags_frozen()
        assert seht.hessian_trace(model, closure, seed=1, engine=engine).item() == expected
        assert flags() == before
