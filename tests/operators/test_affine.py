"""Networks whose outputs are affine in each weight alone: tr(H) = tr(G), and others where not.

The oracle is exact: for every network that is taken for one of the first kind, the traces of the
two matrices, entry by entry in float64, must be the same number.
"""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot, Square
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrizations import weight_norm

import seht
from seht.engines.forward_only import replicates
from seht.persample.memory import Memory

N, D = 5, 4
X = torch.linspace(-1, 1, N * D).double().view(N, D).sin() * 3
IMAGES = torch.linspace(-3, 3, N * 2 * 6 * 6).double().view(N, 2, 6, 6).cos()
Y = torch.arange(N) % 3


def cross_entropy(z):
    return F.cross_entropy(z, Y)


class Between(nn.Module):
    """A linear layer, something in between, and another one."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        for name, module in modules.items():
            setattr(self, name, module)
        self.between = forward

    def forward(self, x):
        return self.second(self.between(self, self.first(x)))


def between(forward, **modules):
    torch.manual_seed(0)
    return Between(forward, **modules).double().eval()


def exact_gauss_newton(model, loss, x):
    """The trace of J^T H_out J by whole Jacobians."""
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}

    def outputs(given):
        return torch.func.functional_call(model, given, x).flatten()

    jacobians = torch.func.jacrev(outputs)({n: w.detach() for n, w in weights.items()})
    z = model(x).detach()
    inner = torch.func.hessian(lambda flat: loss(flat.view_as(z)))(z.flatten())
    blocks = [j.flatten(1) for j in jacobians.values()]
    return sum(torch.einsum("ip,ij,jp->", j, inner, j).item() for j in blocks)


def taken(model, x, loss=cross_entropy, closure=None):
    """Whether the trace is had by way of G."""
    return replicates(model, closure or (lambda: loss(model(x))), probes=1).affine


def shifted(h):
    h += 1
    return h


AFFINE = {
    "relu": lambda m, h: h.relu(),
    "in-place": lambda m, h: (F.relu(h, inplace=True) * 2).add_(1),
    "augmented": lambda m, h: shifted(h * 2),
    "leaky": lambda m, h: F.leaky_relu(h, 0.1) - F.relu6(h) / 3,
    "hard": lambda m, h: F.hardtanh(h) + h.abs() + h.clamp(min=-0.5) + F.threshold(h, 0.1, 2.0),
    "choice": lambda m, h: torch.where(h > 0, h, -2 * h) + torch.maximum(h, h.flip(1)),
    "masked": lambda m, h: h.masked_fill(h < 0, 0.0),
    "moved": lambda m, h: h.view(N, 2, 2).transpose(1, 2).flatten(1).roll(1, 1)[:, [1, 0, 3, 2]],
    "joined": lambda m, h: torch.cat([h[:, :2], torch.stack([h[:, 0], h[:, 3]], 1)], 1),
    "pooled": lambda m, h: F.max_pool1d(h.unsqueeze(1), 2).repeat(1, 1, 2).squeeze(1),
    "averaged": lambda m, h: h + h.mean(1, keepdim=True) + h.cumsum(1),
    "scaled": lambda m, h: h * torch.arange(4.0).double() / 7,
    "another weight": lambda m, h: h * m.gate(X.cos()),
    "prelu": lambda m, h: F.prelu(h, torch.full((1,), 0.3).double()),
    "matmul": lambda m, h: h @ m.gate.weight.t() + torch.addmm(h, X, m.gate.weight),
    "batch norm": lambda m, h: m.norm(h),
    "dropout": lambda m, h: F.dropout(h, 0.5),
    "embedding": lambda m, h: h + m.table(Y),
    "wide": lambda m, h: h.float().double() + h.to(torch.float64),
}


def modules():
    norm = nn.BatchNorm1d(D)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    return {"gate": nn.Linear(D, D), "norm": norm, "table": nn.Embedding(3, D)}


@pytest.mark.parametrize("name", AFFINE)
def test_the_two_traces_are_one(name):
    model = between(AFFINE[name], **modules())
    assert taken(model, X)
    if name == "dropout":
        return  # the oracle below cannot hold the mask
    known = [n for n, p in model.named_parameters() if p.dim() > 1]
    exact = seht.exact_trace(model, lambda: cross_entropy(model(X)), params=known).item()
    assert exact == pytest.approx(exact_gauss_newton(model, cross_entropy, X), rel=1e-6)


def written_through_a_view(m, h):
    y = h * 1
    y[:, :2].mul_(m.gate(h)[:, :2])
    return y


def stale_view(m, h):
    y = h * 1
    view = y.view(-1)
    y.mul_(m.gate(h))
    return view.view_as(h)


def behind_its_back(m, h):
    y = h * 1
    y.data.mul_(2.0)
    return y


def assigned(m, h):
    y = torch.zeros_like(h)
    y[:] = h**2
    return y


CURVED = {
    "tanh": lambda m, h: h.tanh(),
    "gelu": lambda m, h: F.gelu(h),
    "layer norm": lambda m, h: F.layer_norm(h, (D,)),
    "softmax": lambda m, h: h.softmax(-1),
    "squared": lambda m, h: h * h,
    "again": lambda m, h: m.first(h),
    "again in a product": lambda m, h: (h @ m.gate.weight) @ m.gate.weight,
    "quotient": lambda m, h: X / (h + 20),
    "batch norm without statistics": lambda m, h: F.batch_norm(h, None, None, training=True),
    "view": written_through_a_view,
    "stale view": stale_view,
    "assigned": assigned,
    "vmap": lambda m, h: torch.vmap(lambda row: row**2)(h),
    "detached": lambda m, h: h * h.detach(),
    "data": behind_its_back,
    "unseen": lambda m, h: Square.apply(h),
}


@pytest.mark.parametrize("name", CURVED)
def test_others_are_not_taken_for_it(name):
    from seht.operators.affine import Affine, NotAffine

    model = between(CURVED[name], **modules())
    watch = Affine(p for p in model.parameters() if p.dim() > 1)
    held = False
    with contextlib.suppress(NotAffine):
        with watch:
            z = model(X)
        held = watch.holds([z])
    assert not held


def test_a_model_that_catches_errors_is_not_taken_for_it():
    def forgiving(m, h):
        try:
            return h.sigmoid()
        except Exception:
            return h.relu()

    assert not taken(between(forgiving), X)


def test_a_parametrised_weight_is_curved():
    model = between(lambda m, h: h.relu())
    weight_norm(model.first)
    assert not taken(model, X)


def test_a_layer_used_twice_behind_different_inputs_is_affine():
    """Siamese branches: each output is affine in the weight, and the loss may mix them."""
    model = between(lambda m, h: h.relu())

    def closure():
        return (model(X) - model(X.flip(0))).pow(2).mean()

    found = replicates(model, closure, estimator=seht.SehtS(coupling="own"), probes=1)
    assert found.affine


PIECES = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "linear": lambda: nn.Linear(D, D),
    "norm": lambda: nn.BatchNorm1d(D),
    "layer-norm": lambda: nn.LayerNorm(D),
    "leaky": lambda: nn.LeakyReLU(0.2),
}


@pytest.mark.parametrize("names", list(itertools.product(PIECES, repeat=2)), ids="-".join)
def test_whatever_is_taken_for_it_is(names):
    torch.manual_seed(1)
    parts = [PIECES[name]() for name in names]
    model = nn.Sequential(nn.Linear(D, D), *parts, nn.Linear(D, 3)).double().eval()
    says = taken(model, X)
    exact = seht.exact_trace(model, lambda: cross_entropy(model(X))).item()
    same = exact == pytest.approx(exact_gauss_newton(model, cross_entropy, X), rel=1e-6)
    assert says == same == {"tanh", "layer-norm"}.isdisjoint(names)


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_trace_is_unbiased_and_varies_less(per_layer):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 3),
    ).double().eval()  # fmt: skip

    def closure():
        return cross_entropy(model(IMAGES))

    before = Snapshot(model)
    found = replicates(model, closure, probes=400, per_layer=per_layer)
    other = replicates(model, closure, probes=400, per_layer=per_layer, memory=Memory(affine=False))
    before.assert_same(Snapshot(model))
    assert (found.affine, other.affine) == (True, False)
    exact = seht.exact_trace(model, closure).item()
    spreads = []
    for one in (found, other):
        draws = torch.tensor(one.traces).double()
        assert abs(draws.mean() - exact) < 4 * draws.std() / 400**0.5
        spreads.append(draws.std())
    if not per_layer:  # the blocks alone have no noise between layers
        assert spreads[0] < spreads[1]
    for name, values in found.layers.items():
        draws = torch.tensor(values).double()
        wanted = seht.exact_trace(model, closure, params=name).item()
        assert abs(draws.mean() - wanted) < 4 * draws.std() / 400**0.5


def test_a_weight_in_the_loss_itself_is_seen():
    model = between(lambda m, h: h.relu())

    def closure():
        return cross_entropy(model(X)) + model.second.weight.pow(2).sum()

    found = replicates(model, closure, probes=300, estimator=seht.SehtS(coupling="own"))
    draws = torch.tensor(found.traces).double()
    assert not found.affine
    exact = seht.exact_trace(model, closure).item()
    assert abs(draws.mean() - exact) < 4 * draws.std() / 300**0.5


class Once(torch.autograd.Function):
    """Squares, whose derivative can be had once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def test_a_loss_without_a_second_derivative_needs_none():
    """Values alone are enough for the other way."""
    apply = seht.register_kink(Once.apply, "smooth")
    model = between(lambda m, h: h.relu())

    def closure():
        return apply(model(X)).mean()

    found = replicates(model, closure, probes=300)
    assert not found.affine
    draws = torch.tensor(found.traces).double()
    exact = seht.exact_trace(model, lambda: model(X).pow(2).mean()).item()
    assert abs(draws.mean() - exact) < 4 * draws.std() / 300**0.5


def test_another_batch_may_go_another_way():
    """Each batch is looked at: what held for the first need not hold for the next."""
    model = between(lambda m, h: h.relu() if m.straight else h.tanh(), straight=None)
    memory = Memory()
    for straight in (True, False):
        model.straight = straight
        found = replicates(model, lambda: cross_entropy(model(X)), probes=300, memory=memory)
        assert found.affine == straight
        draws = torch.tensor(found.traces).double()
        exact = seht.exact_trace(model, lambda: cross_entropy(model(X))).item()
        assert abs(draws.mean() - exact) < 4 * draws.std() / 300**0.5


def test_trying_costs_no_random_numbers():
    model = between(lambda m, h: F.dropout(h, 0.5).tanh())

    def closure():
        return cross_entropy(model(X))

    found, after = [], []
    for memory in (Memory(), Memory(affine=False)):
        torch.manual_seed(5)
        found.append(replicates(model, closure, memory=memory).traces)
        after.append(torch.rand(()).item())
    assert found[0] == found[1]
    assert after[0] == after[1]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyError, RuntimeError])
def test_an_error_of_the_users_stays_what_it_was(at, error):
    """Also one that would not come a second time."""
    model, calls = between(lambda m, h: h.relu()), []

    def closure():
        calls.append(1)
        if len(calls) == at:
            raise error("mine")
        return cross_entropy(model(X))

    before = Snapshot(model)
    with pytest.raises(error, match="mine"):
        replicates(model, closure)
    before.assert_same(Snapshot(model))


def test_examples_along_another_axis():
    """They are found in the second run only; that one counts."""

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x):  # (time, batch, width)
            return self.outer(self.inner(x).relu().mean(0))

    torch.manual_seed(0)
    model, x = TimeFirst().double(), torch.randn(2, N, 3).double()
    found = replicates(model, lambda: cross_entropy(model(x)), probes=1)
    assert found.affine
    assert found.n == N


def test_the_result_says_so():
    model = between(lambda m, h: h.relu())

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    straight = seht.measure.trace(model, loss_fn, (X, Y), probes=100)
    assert any("tr(H) = tr(G)" in note for note in straight.notes)
    same = seht.measure.trace(model, loss_fn, (X, Y), probes=100, curvature="ggn")
    assert straight.estimate == pytest.approx(same.estimate)
    assert not same.notes
    curved = between(lambda m, h: h.tanh())
    assert not seht.measure.trace(curved, loss_fn, (X, Y)).notes
