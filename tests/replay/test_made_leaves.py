"""Closures that make leaves of their own (``X.clone().requires_grad_()``): new ones in every run.

Truth is the ``autograd`` engine in float64, the made leaves' own gradients included.
"""

import pytest
import torch
import torch.nn.functional as F
from stepping import Drawn, assert_gradients, warm_up
from torch import nn
from torch.utils.checkpoint import checkpoint

import seht
from seht.engines.step_size import START
from seht.replay.leaves import pairs

CURVATURES = {"hessian": {}, "ggn": {"two_sided": True}}
every_curvature = pytest.mark.parametrize("curvature", CURVATURES)
every_form = pytest.mark.parametrize("form", ["scalar", "late", "lean", "hooked"])


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 3)
    ).double()


def data():
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(12) % 3


def one_leaf(model):
    x, y = data()
    leaf = x.clone().requires_grad_()
    return F.cross_entropy(model(leaf), y), (leaf,)


def input_gradient(model):
    """A gradient penalty, as of WGAN-GP and R1."""
    x, y = data()
    leaf = x.detach().requires_grad_()
    loss = F.cross_entropy(model(leaf), y)
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return loss + slope.square().sum(), (leaf,)


def two_leaves(model):
    """Of one shape, used in another order than they were made, one of them behind the outputs."""
    x, y = data()
    a, b = (part.clone().requires_grad_() for part in x.split(2, 1))
    z = model(torch.cat([b, a], 1))
    return F.cross_entropy(z + b.sum(1, keepdim=True) * a[:, :1].sin(), y), (a, b)


def equal_leaves(model):
    """They have one value, too, and meet in an operation that is replayed as another one."""
    x, y = data()
    a, b = (torch.zeros(12, 3, dtype=x.dtype, requires_grad=True) for _ in range(2))
    z = model(x)
    return F.cross_entropy(torch.maximum(2 * z + b, z + a) + a * z, y), (a, b)


def parameter(model):
    x, y = data()
    shift = nn.Parameter(torch.ones(4, dtype=x.dtype))
    return F.cross_entropy(model(x * shift), y), (shift,)


CLOSURES = [one_leaf, input_gradient, two_leaves, equal_leaves, parameter]
every_closure = pytest.mark.parametrize("make", CLOSURES, ids=lambda make: make.__name__)


def step(model, closure, form, **options):
    """The gradient of one penalised step, in the parameters and in the leaves that were made."""
    penalty = seht.HessianTrace(model, weight=0.3, seed=5, **options)
    if form == "late":
        warm_up(penalty)
    hook = model[2].register_full_backward_hook(lambda *_: None) if form == "hooked" else None
    if form == "lean":
        _, made = penalty.backward(closure)
    else:
        loss, made = penalty(closure)
        loss.backward()
    if hook is not None:
        hook.remove()
    return [leaf.grad for leaf in (*model.parameters(), *made)], len(made)


def assert_same(found, truth, made, rtol=1e-5):
    assert_gradients(found, truth, rtol)
    for a, b in zip(found[-made:], truth[-made:], strict=True):
        assert (a - b).norm() <= rtol * b.norm()


@every_closure
@every_form
@every_curvature
@pytest.mark.parametrize("drawn", [(0, 1, 2), (2,)], ids=["all", "last"])
def test_right_in_every_leaf(make, form, curvature, drawn):
    model, exact = network(), network()
    own = {"curvature": curvature, "estimator": Drawn(*drawn, probes=2)}
    truth, made = step(exact, lambda: make(exact), "scalar", engine="autograd", **own)
    own |= CURVATURES[curvature]
    found, _ = step(model, lambda: make(model), form, engine="difference", **own)
    assert_same(found, truth, made)


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_one_sided(form):
    """The default of curvature="ggn": of first order in a step of 1e-6."""
    model, exact = network(), network()
    truth, _ = step(exact, lambda: one_leaf(exact), "scalar", engine="autograd", curvature="ggn")
    found, made = step(model, lambda: one_leaf(model), form, curvature="ggn")
    assert_same(found, truth, made)


@every_curvature
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_probe_for_each_example(form, curvature):
    """Made or not, a leaf changes nothing for the weights."""
    model, other = network(), network()
    options = {"estimator": "seht-s", "curvature": curvature}
    found, _ = step(model, lambda: one_leaf(model), form, **options)
    x, y = data()
    plain = lambda: (F.cross_entropy(other(x), y), ())
    truth, _ = step(other, plain, form, **options)
    assert_gradients(found[:-1], truth, 1e-6)


class Adapted(nn.Module):
    """A frozen network with low-rank adapters; its embedding's output is made a leaf, as PEFT's
    ``enable_input_require_grads`` does for activation checkpoints.
    """

    def __init__(self, reentrant, leaf):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(4, 16) / 4 for _ in range(3))
        self.up = nn.ParameterList(0.02 * torch.randn(16, 4) for _ in range(3))
        self.reentrant = reentrant
        if leaf:
            self.embedding.register_forward_hook(lambda m, i, out: out.requires_grad_())

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            block = lambda h, *at: h + F.gelu(at[0](h) + F.linear(F.linear(h, at[1]), at[2]))
            if self.reentrant is None:
                h = block(h, layer, down, up)
            else:
                h = checkpoint(block, h, layer, down, up, use_reentrant=self.reentrant)
        return self.head(h)


@every_curvature
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_step_is_the_same_with_and_without_the_leaf(reentrant, curvature):
    """In float32: gradients that the perturbed passes do not reach look like rounding, and the
    step grew to the largest there is.
    """
    tokens = torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(3))
    found = {}
    for leaf in (False, True):
        model = Adapted(reentrant if leaf else None, leaf)
        penalty = seht.HessianTrace(model, weight=1e-3, curvature=curvature, seed=1)

        def closure(model=model):
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

        for _ in range(12):
            model.zero_grad()
            penalty(closure).backward()
        gradient = [p.grad for p in model.parameters() if p.requires_grad]
        found[leaf] = penalty.state_dict()["engine"]["kappa"], penalty.last.error, gradient
    assert found[True][0] == pytest.approx(found[False][0], rel=0.5)
    assert found[True][0] <= 4 * START[curvature, torch.float32]
    assert found[True][1] < 0.05
    assert_gradients(found[True][2], found[False][2], 0.02)


def test_twins_of_one_kind_are_told_by_their_values():
    a, b, c = (torch.full((2,), v, requires_grad=True) for v in (1.0, 2.0, 3.0))
    again = [torch.full((2,), v, requires_grad=True) for v in (3.0, 1.0)]
    found = pairs([a, b, c], [(again[0] * again[1]).sum()], [])
    assert [(id(x), id(y)) for x, y in found] == [(id(c), id(again[0])), (id(a), id(again[1]))]
    with pytest.raises(seht.UnrepeatableError, match="other values"):
        pairs([a, b, c], [(4 * torch.full((2,), 9.0, requires_grad=True)).sum()], [])


def test_a_leaf_of_the_first_run_alone_is_refused():
    """Its gradient would be multiplied by thousands."""
    model, x, runs = network(), data()[0], []

    def closure():
        runs.append(len(runs))
        out = model(x).square().mean()
        with torch._C.DisableTorchFunction():  # nothing that a mode would see
            leaf = torch.ones(3, dtype=x.dtype, requires_grad=len(runs) == 1)
            return out + leaf.square().sum()

    with pytest.raises(seht.UnrepeatableError, match="its first run alone"):
        seht.HessianTrace(model, weight=0.1, engine="difference")(closure)
