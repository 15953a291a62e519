"""Models that cast to less inside than their weights are: the step is that of what they compute in.

Truth is the same model without the casts, in float64 by nested autograd.
"""

import pytest
import torch
import torch.nn.functional as F
from stepping import assert_gradients
from torch import nn

import seht
from seht import measure
from seht.engines.step_size import START
from seht.tensors.graph import survey

TOKENS = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(1))


class Norm(nn.Module):
    """As Hugging Face's: in float32, whatever comes."""

    def __init__(self, inside):
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.ones(8)), inside

    def forward(self, x):
        h = x.to(self.inside)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Small(nn.Module):
    """A gated network on tokens, with such a norm before each block and before the head."""

    def __init__(self, inside=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        self.norms = nn.ModuleList(Norm(inside) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        h = self.embedding(tokens)
        for norm, gate, down in zip(self.norms, self.gates, self.downs, strict=False):
            a, b = gate(norm(h)).chunk(2, -1)
            h = h + down(F.silu(a) * b)
        return self.head(self.norms[-1](h))


def loss_fn(model, tokens, dtype=None):
    z = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(z if dtype is None else z.to(dtype), tokens[:, 1:].flatten())


def gradient(trace, model):
    return list(torch.autograd.grad(trace, list(model.parameters()), allow_unused=True))


# Float32's own step and rounding; bfloat16 is as far off as docs/precision.md says.
CASTS = {"norms": (torch.float32, None), "loss": (torch.float64, torch.float32)}


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("cast", CASTS)
def test_a_float64_model_that_computes_in_float32(cast, curvature):
    inside, last = CASTS[cast]
    model, exact = Small(inside).double(), Small().double()
    options = {"curvature": curvature, "seed": 3}
    truth = seht.hessian_trace(exact, lambda: loss_fn(exact, TOKENS), engine="autograd", **options)
    found = seht.hessian_trace(model, lambda: loss_fn(model, TOKENS, last), **options)
    assert found.item() == pytest.approx(truth.item(), rel=0.01)
    assert_gradients(gradient(found, model), gradient(truth, exact), 0.05)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_the_first_step_of_a_penalty(form, curvature):
    model = Small(torch.float32).double()
    penalty = seht.HessianTrace(model, weight=1.0, curvature=curvature, seed=3)
    closure = lambda: loss_fn(model, TOKENS)
    penalty.backward(closure) if form == "lean" else penalty(closure).backward()
    state = penalty.state_dict()["engine"]
    assert state["eps"] == torch.finfo(torch.float32).eps
    assert penalty.last.error < 0.05
    resumed = seht.HessianTrace(model, weight=1.0, curvature=curvature, seed=3)
    resumed.load_state_dict(penalty.state_dict())
    resumed(closure)
    assert resumed.state_dict()["engine"]["kappa"] == pytest.approx(state["kappa"], rel=3)


def test_a_float32_model_that_computes_in_bfloat16():
    """Rounded, and at the step that bfloat16 has: a tenth, not a hundredth."""
    model = Small(torch.bfloat16)
    penalty = seht.HessianTrace(model, weight=1e-6, curvature="hessian", kappa=None)
    penalty._course.engine.steps.next_check = 10**9
    penalty(lambda: loss_fn(model, TOKENS))
    assert penalty.state_dict()["engine"]["kappa"] == START["hessian", torch.bfloat16]


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_measured(curvature, per_layer):
    found = []
    for inside in (torch.float32, torch.float64):
        model = Small(inside).double()
        result = measure.trace(
            model,
            lambda m, batch: loss_fn(m, batch[0]),
            [(TOKENS,)],
            curvature=curvature,
            per_layer=per_layer,
            method="shared",
            seed=2,
        )
        found.append(result.estimate)
    assert found[0] == pytest.approx(found[1], rel=1.5e-3)


def test_what_counts():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert survey([w.sin().sum()]).coarsest == torch.float64
    assert survey([w.sin().sum().float()]).coarsest == torch.float64  # its gradient is 1
    assert survey([w.float().sin().sum().double()]).coarsest == torch.float32
    assert survey([w.float().bfloat16().sin().sum().double()]).coarsest == torch.bfloat16
    assert survey([torch.view_as_complex(w[:2].float()).abs().sum()]).coarsest == torch.float32
    assert survey([(w * w.detach().float()).sum()]).coarsest == torch.float64
