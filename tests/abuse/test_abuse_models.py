"""Unusual models: several of them, shared, tied, parametrised, frozen, cast, complex, meta."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from abusing import Surroundings, assert_right, every_difference, every_way, penalty_of, run
from helpers import Snapshot
from stepping import assert_gradients, mlp, rows
from torch import nn
from torch.nn.utils import parametrizations

import seht


class Tied(nn.Module):
    """Embedding and head share a weight; one module is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        return self.head(F.relu(self.middle(F.relu(self.middle(self.embed(tokens))))))


class Adapter(nn.Module):
    """A low-rank path beside a frozen layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.3)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def adapted():
    model = mlp().requires_grad_(False)
    model[0], model[4] = Adapter(model[0]), Adapter(model[4])
    return model.double()


def parametrised():
    torch.manual_seed(1)
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(5, 5)), nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(5, 5)), nn.Linear(5, 3),
    ).double()  # fmt: skip


def entropy_of(model):
    x, y = rows()
    return lambda: F.cross_entropy(model(x), y)


@pytest.mark.supports("adapters on a frozen model, parametrised weights", engine="{form}")
@every_difference
@pytest.mark.parametrize("build", [adapted, parametrised])
def test_right(build, form, curvature):
    penalty = assert_right(build, entropy_of, form, curvature, rtol=1e-4)
    if build is adapted:
        assert penalty.last.layers == ("0.a", "0.b", "4.a", "4.b")
        assert penalty.model[0].base.weight.grad is None


@pytest.mark.supports("tied weights and shared modules", engine="{form}")
@every_difference
def test_tied_weights_and_shared_modules(form, curvature):
    tokens = torch.arange(7)
    make = lambda model: lambda: F.cross_entropy(model(tokens), (tokens + 1) % 7)
    penalty = assert_right(Tied, make, form, curvature, rtol=1e-4)
    assert penalty.last.layers == ("embed.weight", "middle.weight")


def gan(engine, form, curvature, steps=2):
    """Two models, two penalties, two optimisers; what is handed over is detached once."""
    torch.manual_seed(2)
    generator = mlp(seed=1)
    critic = nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1)).double()
    penalties = [penalty_of(m, engine, curvature, warm=False) for m in (critic, generator)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for k in range(steps):
        noise, real = rows(seed=k)[0], rows(width=3, seed=50 + k)[0]
        loss = F.binary_cross_entropy_with_logits
        closures = [
            lambda n=noise, r=real: (
                loss(critic(r), ones) + loss(critic(generator(n).detach()), zeros)
            ),
            lambda n=noise: loss(critic(generator(n)), ones),
        ]
        for penalty, optimizer, closure in zip(penalties, optimizers, closures, strict=True):
            critic.zero_grad(), generator.zero_grad()
            run(penalty, closure, form)
            if closure is closures[0]:
                assert all(p.grad is None for p in generator.parameters())
            optimizer.step()
    assert generator[1].num_batches_tracked == 2 * steps
    return [p.detach() for m in (generator, critic) for p in (*m.parameters(), *m.buffers())]


@pytest.mark.supports("several models in one loss (a GAN)", engine="{form}")
@every_difference
def test_a_gan(form, curvature):
    for a, b in zip(
        gan("difference", form, curvature), gan("autograd", "scalar", curvature), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.supports("parameters frozen, unfrozen or added between steps")
@every_way
def test_parameters_come_and_go_between_steps(engine, form, curvature):
    model = mlp()
    penalty = penalty_of(model, engine, curvature, warm=False)
    closure = entropy_of(model)

    def layers():
        model.zero_grad()
        run(penalty, closure, form)
        # A penalty that knows nothing of the past estimates the same.
        fresh = seht.hessian_trace(
            model, closure, engine="autograd", curvature=curvature, seed=penalty.last.seed
        )
        assert penalty.last.trace == pytest.approx(fresh.item(), rel=1e-4)
        return penalty.last.layers

    assert layers() == ("0.weight", "4.weight")
    model[0].weight.requires_grad_(False)
    assert layers() == ("4.weight",) and model[0].weight.grad is None
    model[0].weight.requires_grad_(True)
    model.insert(3, nn.Linear(6, 6).double())
    assert layers() == ("0.weight", "3.weight", "5.weight")
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
    assert layers() == ("0.weight", "3.weight", "5.weight")
    model.requires_grad_(False)
    before = Surroundings(model, penalty)
    with pytest.raises(ValueError, match="set requires_grad_"):
        run(penalty, closure, form)
    Surroundings(model, penalty).assert_same(before)


@every_way
def test_a_model_that_is_cast_between_steps(engine, form, curvature):
    """The step that suits float64 is nonsense in float32."""
    model = mlp()
    penalty = penalty_of(model, engine, curvature, warm=False)
    for _ in range(3):
        model.zero_grad()
        run(penalty, entropy_of(model), form)
    for dtype, rtol in ((torch.float32, 0.02), (torch.float64, 1e-4)):
        model.to(dtype)
        model.zero_grad()
        x, y = rows(dtype=dtype)
        closure = lambda x=x, y=y: F.cross_entropy(model(x), y)
        run(penalty, closure, form)
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        other = penalty_of(model, "autograd", curvature)
        other._course.account.calls = penalty._course.account.calls - 1
        run(other, closure, "scalar")
        assert_gradients(got, [p.grad for p in model.parameters()], rtol=rtol)


@every_way
def test_copies_and_pickles_in_the_middle_of_a_step(engine, form, curvature):
    model = mlp()
    penalty = penalty_of(model, engine, curvature)
    total = penalty(entropy_of(model))
    copies = [copy.deepcopy(penalty), pickle.loads(pickle.dumps(penalty))]
    total.backward()
    model.zero_grad()
    run(penalty, entropy_of(model), form)
    for other in copies:
        run(other, entropy_of(other.model), form)
        Snapshot(other.model).assert_same(Snapshot(model))
        assert other.last == penalty.last and other.step == penalty.step == 2


@every_way
def test_empty_batches(engine, form, curvature):
    model, (x, y) = mlp(norm=False), rows()
    penalty = penalty_of(model, engine, curvature, warm=False)
    run(penalty, lambda: F.cross_entropy(model(x[:0]), y[:0], reduction="sum"), form)
    assert penalty.last.trace == 0
    assert all(not p.grad.any() for p in model.parameters())
    before = Surroundings(model, penalty)
    with pytest.raises(seht.NonFiniteError, match="look for the first batch"):
        run(penalty, lambda: F.cross_entropy(model(x[:0]), y[:0]), form)
    Surroundings(model, penalty).assert_same(before)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.v = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x):
        return torch.view_as_real((x @ self.v).tanh().to(self.w.dtype) @ self.w)


@every_difference
def test_complex_parameters(form, curvature, recwarn):
    with pytest.raises(TypeError, match="leave it out with params="):
        seht.HessianTrace(Complex(), weight=0.01)
    x, _ = rows(width=3)
    make = lambda model: lambda: model(x).square().square().sum()
    assert_right(Complex, make, form, curvature, rtol=1e-4, params="v")
    assert not recwarn.list


@every_way
def test_models_without_data(engine, form, curvature):
    x, y = rows()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3)).double()
    penalty = penalty_of(model, engine, curvature)
    with pytest.raises(ValueError, match=r"meta device and has no value; load the model's weights"):
        run(penalty, lambda: F.cross_entropy(model(x.to("meta")), y.to("meta")), form)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, device="meta")).double()
    with pytest.raises(ValueError, match="several devices.*params="):  # noqa: RUF043
        penalty_of(model, engine, curvature)
    model = nn.ModuleList([mlp(), nn.Linear(3, 3, device="meta")])
    part = penalty_of(model, engine, curvature, params="0.*")
    run(part, lambda: F.cross_entropy(seht.boundary(model[0](x)), y), form)
    assert part.last.trace is not None and model[1].weight.grad is None
    whole = nn.Module()
    whole.table = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match="no parameter of the model is floating"):
        seht.HessianTrace(whole, weight=0.01)


@pytest.mark.supports("sparse gradients")
@every_way
def test_sparse_gradients(engine, form, curvature):
    tokens, y = torch.arange(8).view(4, 2), torch.arange(4) % 3

    def build(sparse):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3)
        ).double()

    found = []
    for sparse in (True, False):
        model = build(sparse)
        run(
            penalty_of(model, engine, curvature),
            lambda m=model: F.cross_entropy(m(tokens), y),
            form,
        )
        found.append([p.grad.to_dense() for p in model.parameters()])
    assert_gradients(*found, rtol=1e-9)


@every_difference
def test_parts_under_no_grad(form, curvature):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

        @torch.no_grad()
        def features(self, x):
            return F.relu(self.a(x))

        def forward(self, x):
            return self.b(self.features(x))

    penalty = assert_right(Half, entropy_of, form, curvature)
    assert penalty.last.unused == ("a.weight",)
