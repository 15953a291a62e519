"""Where the examples are: found, followed, lost, coupled; and what SEHT-S says about it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot
from torch import nn

import seht
from seht.engines.forward_only import replicates
from seht.operators.axes import Axis, Broken
from seht.persample.memory import Layout, Memory

N = 4


def body(forward, *, size=3):
    """A linear layer, something in between, and another one."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

        def forward(self, x):
            return self.second(forward(torch.tanh(self.first(x))))

    torch.manual_seed(0)
    return Body().double()


def trace(model, x, loss=lambda z: z.pow(2).mean(), **options):
    return seht.hessian_trace(
        model, lambda: loss(model(x)), estimator="seht-s", seed=1, **options
    ).item()


X = torch.linspace(-1, 1, N * 2 * 3).double().view(N, 2, 3)

APART = {
    "transposed": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "merged": lambda h: h.reshape(-1, 3),
    "merged-and-split": lambda h: (h.reshape(-1, 3) * 2).view(N, 2, 3),
    "heads": lambda h: h.permute(1, 0, 2).reshape(2 * N, 3).view(2, N, 3).permute(1, 0, 2),
    "softmax": lambda h: h.softmax(1) + h.log_softmax(-1),
    "attention": lambda h: h + F.scaled_dot_product_attention(h, h, h),
    "attention-dropout": lambda h: h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.5),
    "bmm": lambda h: h + torch.bmm(torch.bmm(h, h.mT), h),
    "einsum": lambda h: h + torch.einsum("bij,bkj,bkl->bil", h, h, h),
    "cumsum": lambda h: h.cumsum(1),
    "norms": lambda h: F.layer_norm(h, (3,)) + F.group_norm(h, 1) + F.normalize(h, dim=-1),
    "cat": lambda h: torch.cat([h, torch.ones(N, 1, 3).double()], 1)[:, 1:],
    "twice": lambda h: torch.cat([h, h.flip(1)], 0),
    "stack": lambda h: torch.stack([h, -h], 0).sum(0),
    "indexed": lambda h: h[torch.arange(N).flip(0)][:, [1, 0]],
    "mask": lambda h: h[torch.ones(N, 2).bool()],
    "gather": lambda h: h.gather(1, torch.zeros(N, 1, 3).long()).expand(-1, 2, -1) + h,
    "pool": lambda h: F.adaptive_avg_pool1d(h, 3) + F.max_pool1d(h, 3, 1, 1),
    "pad": lambda h: F.pad(h, (1, 1))[..., 1:-1],
    "written": lambda h: _written(h),
    "dropout": lambda h: F.dropout(h, 0.5),
    "statistics-of-constants": lambda h: h - X.mean(0) + (h.detach() - h.detach().mean(0)),
    "where": lambda h: torch.where(h > 0, h, h.exp()),
    "unbind": lambda h: torch.stack(h.unbind(1), 1),
    "routed": lambda h: _routed(h),
    "unfold": lambda h: F.unfold(h.unsqueeze(1), (1, 3), padding=(0, 1)).mT[:, :2] + h,
    "nothing": lambda h: torch.cat([h[:, :0], h], 1),
    "custom": lambda h: Cube.apply(h),
    "custom-wrapped": lambda h: seht_cube(h),
}


def _written(h):
    out = torch.zeros(N, 2, 3).double()
    for i in range(2):
        out[:, i] = h[:, 1 - i]
    return out


def _routed(h):
    """Rows to experts by a decision; the last expert gets none."""
    rows = h.reshape(-1, 3)
    best, out = rows.argmax(1), torch.zeros_like(rows)
    for k in range(4):
        chosen = (best == k).nonzero().squeeze(1)
        out = out.index_add(0, chosen, (k + 1) * rows[chosen])
        out[best == k] = out[best == k].sin()
    return out.view(N, 2, 3)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Centred(torch.autograd.Function):
    """What it computes looks constant from inside."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


seht_cube = seht.register_kink(Cube.apply, "smooth")


@pytest.mark.parametrize("name", APART)
def test_what_keeps_examples_apart_is_followed(name):
    """Both weights vary, and the trace is that of examples run one by one."""
    model = body(APART[name])
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", seed=2)
    penalty(lambda: model(X).pow(2).mean())
    assert penalty.last.shared == ()


COUPLED = {
    "mean": lambda h: h - h.mean(0),
    "softmax": lambda h: h.softmax(0),
    "similarity": lambda h: (h.flatten(1) @ h.flatten(1).T).unsqueeze(-1).expand(-1, -1, 3),
    "batch-norm": lambda h: F.batch_norm(h.mT, None, None, training=True).mT,
    "attention-over-examples": lambda h: F.scaled_dot_product_attention(
        h.transpose(0, 1), h.transpose(0, 1), h.transpose(0, 1)
    ).transpose(0, 1),
    "norm": lambda h: h / h.norm(),
    "max": lambda h: h - h.amax(0),
    "cumsum": lambda h: h.cumsum(0),
    "function": lambda h: Centred.apply(h),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_examples_is_refused(name):
    model = body(COUPLED[name])
    with pytest.raises(seht.ExampleError, match=r"sum over examples.*seht-h"):
        trace(model, X, batch_dim=0)
    before = Snapshot(model)
    with pytest.raises(seht.ExampleError):
        replicates(model, lambda: model(X).pow(2).mean(), estimator=seht.SehtS(batch_dim=0))
    before.assert_same(Snapshot(model))


LOSSES = {
    "log of a mean": lambda z: z.pow(2).mean().log(),
    "product of means": lambda z: z.mean() * z.pow(2).mean(),
    "contrastive": lambda z: (z.flatten(1) @ z.flatten(1).T).logsumexp(1).mean(),
    "norm": lambda z: z.norm(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_sum_is_refused(name):
    with pytest.raises(seht.ExampleError, match="sum over examples"):
        trace(body(torch.tanh), X, LOSSES[name], batch_dim=0)


SUMS = {
    "sum": lambda z: z.pow(2).sum(),
    "parts": lambda z: 0.5 * z.pow(2).mean() + z.exp().sum(1).mean() / 3 - z.sum(),
    "stacked": lambda z: torch.stack([z[:, i].exp().mean() for i in range(2)]).mean(),
    "cross-entropy": lambda z: F.cross_entropy(z.transpose(1, 2), torch.ones(N, 2).long()),
    "cross-entropy-none": lambda z: F.cross_entropy(
        z.reshape(-1, 3), torch.ones(2 * N).long(), reduction="none"
    ).mean(),
    "smooth-l1": lambda z: F.smooth_l1_loss(z, X) + F.huber_loss(z, 2 * X) + F.mse_loss(z, X),
    "cosine": lambda z: F.cosine_similarity(z, X, -1).mean(),
    "kl": lambda z: F.kl_div(z.log_softmax(-1), X.softmax(-1), reduction="batchmean"),
    "ctc-like": lambda z: F.multi_margin_loss(z.reshape(-1, 3), torch.ones(2 * N).long()),
    "soft margin": lambda z: F.soft_margin_loss(z, X.sign()),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_examples_is_one_however_it_is_written(name):
    assert trace(body(torch.tanh), X, SUMS[name]) != 0


def test_a_term_beside_the_loss_keeps_its_weights_shared():
    model = body(torch.tanh)
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", seed=2)
    penalty(lambda: model(X).pow(2).mean() + model.first.weight.pow(4).sum())
    assert penalty.last.shared == ("first.weight",)


# --- the opt-ins --------------------------------------------------------------------------------


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    ).double()


IMAGES = torch.linspace(-2, 1, N * 18).double().cos().view(N, 2, 3, 3)


def loss_of(model):
    return lambda: F.cross_entropy(model(IMAGES), torch.arange(N) % 3)


@pytest.mark.supports("BatchNorm2d", section="layers", engine="SEHT-S", cell="refused")
def test_train_mode_batch_norm_is_refused_and_says_what_to_do():
    model = normalised()
    with pytest.raises(seht.ExampleError, match=r"BatchNorm in train mode.*coupling='frozen'"):
        seht.hessian_trace(model, loss_of(model), estimator="seht-s")
    with pytest.raises(seht.ExampleError, match="BatchNorm in train mode"):  # a slice, made inside
        y = torch.arange(2)
        closure = lambda: F.cross_entropy(model(IMAGES[:2]), y)
        seht.hessian_trace(model, closure, estimator="seht-s")
    assert seht.hessian_trace(model.eval(), loss_of(model), estimator="seht-s").isfinite()


def test_held_statistics():
    """The value is that of the network with these statistics, the gradient flows through them."""
    model = normalised()
    options = {"estimator": "seht-s", "coupling": "frozen", "seed": 4}
    t = seht.hessian_trace(model, loss_of(model), **options)
    weights = list(model.parameters())
    gradient = torch.autograd.grad(t, weights)
    fixed = copy.deepcopy(model)
    y = fixed[0](IMAGES)
    fixed[1].running_mean = y.mean((0, 2, 3)).detach()
    fixed[1].running_var = y.var((0, 2, 3), correction=0).detach()
    same = seht.hessian_trace(fixed.eval(), loss_of(fixed), estimator="seht-s", seed=4)
    assert t.item() == pytest.approx(same.item(), rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    along = [torch.randn(w.shape, generator=generator).double() for w in weights]
    values = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            for w, d in zip(weights, along, strict=True):
                w += step * d
        values.append(seht.hessian_trace(model, loss_of(model), **options).item())
        with torch.no_grad():
            for w, d in zip(weights, along, strict=True):
                w -= step * d
    slope = (values[0] - values[1]) / 2e-4
    mine = sum(float((g * d).sum()) for g, d in zip(gradient, along, strict=True))
    assert mine == pytest.approx(slope, rel=1e-4)
    before = model[1].running_mean.clone()
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", coupling="frozen", seed=4)
    penalty.backward(loss_of(model))
    assert int(model[1].num_batches_tracked) == 1
    assert not torch.equal(before, model[1].running_mean)


def test_own_copies():
    """coupling="own" is the trace with a copy of the weights for each example."""
    model = body(lambda h: h - h.mean(0))
    exact = 0.0
    copies = [copy.deepcopy(model) for _ in range(N)]

    def loss():
        h = torch.cat([torch.tanh(m.first(X[i : i + 1])) for i, m in enumerate(copies)])
        h = h - h.mean(0)
        z = torch.cat([m.second(h[i : i + 1]) for i, m in enumerate(copies)])
        return z.pow(2).mean()

    for m in copies:
        exact += seht.exact_trace(m, loss).item()
    estimator = seht.SehtS(coupling="own", batch_dim=0)
    found = torch.tensor(
        replicates(model, lambda: model(X).pow(2).mean(), estimator=estimator, probes=200).traces
    )
    assert abs(found.mean() - exact) < 4 * found.std() / 200**0.5


# --- finding them ---------------------------------------------------------------------------------


def test_the_dimension_is_found_and_remembered():
    model = nn.GRU(3, 3).double()
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", seed=0)
    x = torch.randn(2, 5, 3).double()
    for _ in range(2):
        penalty(lambda: model(x)[0].pow(2).mean()).backward()
    assert penalty._course.engine.memory.layout == Layout(dim=1)
    assert penalty.last.shared == ()
    other = pickle.loads(pickle.dumps(penalty))
    assert other._course.engine.memory.layout == Layout(dim=1)


def test_batch_dim_wins():
    model = nn.GRU(3, 3).double()
    x = torch.randn(2, 5, 3).double()
    with pytest.raises(seht.ExampleError, match="dimension 0"):
        trace(model, x, lambda z: z[0].pow(2).mean(), batch_dim=0)
    assert trace(model, x, lambda z: z[0].pow(2).mean(), batch_dim=1) != 0


def test_a_closure_that_calls_parts_of_the_model():
    model = body(torch.tanh)
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", seed=0)
    penalty(lambda: model.second(torch.tanh(model.first(X))).pow(2).mean())
    assert penalty.last.shared == ()


def test_dictionaries_and_several_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, batch, mask=None):
            return {"z": self.b(torch.tanh(self.a(batch["x"]))) * mask.unsqueeze(-1)}

    model = Model().double()
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", seed=0)
    batch = {"x": X[:, 0], "names": ["a", "b"]}
    penalty(lambda: model(batch, mask=torch.ones(N).double())["z"].pow(2).mean())
    assert penalty.last.shared == ()


def test_inputs_made_in_the_closure():
    model = body(torch.tanh)
    penalty = seht.HessianTrace(model, weight=1.0, estimator="seht-s", seed=0)
    penalty(lambda: model(X[:3] * 2).pow(2).mean())
    assert penalty.last.shared == ()


def test_no_call_of_the_model():
    model = body(torch.tanh)
    with pytest.raises(seht.ExampleError, match="calls neither the model"):
        seht.hessian_trace(
            model, lambda: F.linear(X, model.first.weight).pow(2).mean(), estimator="seht-s"
        )


def test_one_example_is_the_shared_probe():
    model = body(torch.tanh)
    x = X[:1]
    values = [
        seht.hessian_trace(model, lambda: model(x).pow(2).mean(), estimator=e, seed=3).item()
        for e in ("seht-s", "seht-h")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.supports('`estimator="seht-s"`', engine="autograd", cell="refused")
def test_engine_and_options():
    model = body(torch.tanh)
    with pytest.raises(ValueError, match="needs engine='difference'"):
        seht.HessianTrace(model, weight=1.0, estimator="seht-s", engine="autograd")
    with pytest.raises(ValueError, match="needs engine='difference'"):
        trace(model, X, engine="autograd")
    with pytest.raises(ValueError, match="did you mean 'frozen'"):
        trace(model, X, coupling="frozn")
    with pytest.raises(ValueError, match="batch_dim"):
        trace(model, X, batch_dim=-1)


@pytest.mark.slow
def test_a_compiled_model_is_refused():
    with pytest.raises(seht.ExampleError, match=r"torch\.compile"):
        trace(torch.compile(body(torch.tanh)), X)


# --- without a graph ------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_replicates(curvature):
    """The same traces as the engine's, with and without a graph; the layers add up."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU6(), nn.Flatten(), nn.Linear(4, 3)
    ).double()
    closure = loss_of(model)
    before, memory = Snapshot(model), Memory(affine=False)  # not by its equal, tr(G)
    options = {"seed": 7, "curvature": curvature}
    free = replicates(model, closure, **options, memory=memory)
    layers = replicates(model, closure, **options, memory=memory, per_layer=True)
    before.assert_same(Snapshot(model))
    assert free.n == layers.n == N
    assert free.loss == pytest.approx(closure().item())
    wanted = seht.hessian_trace(model, closure, estimator="seht-s", probes=2, **options).item()
    assert sum(free.traces) / 2 == pytest.approx(wanted, rel=1e-4)
    assert layers.traces == pytest.approx(free.traces, rel=1e-4)
    assert set(layers.layers) == {"0.weight", "5.weight"}
    one = replicates(model, closure, **options, estimator=seht.SehtH())
    shared = seht.hessian_trace(model, closure, probes=2, **options).item()
    assert one.n is None
    assert sum(one.traces) / 2 == pytest.approx(shared, rel=1e-4)


def test_layers_are_the_blocks_of_the_exact_trace():
    model = body(torch.tanh)

    def closure():
        return model(X).exp().mean()

    found = replicates(model, closure, probes=200, per_layer=True, params="*.weight").layers
    for name, values in found.items():
        exact = seht.exact_trace(model, closure, params=name).item()
        draws = torch.tensor(values)
        assert abs(draws.mean() - exact) < 4 * draws.std() / 200**0.5


def test_the_graph_is_kept_where_the_closure_uses_it():
    model = body(torch.tanh)

    def closure():
        z = model(X)
        g = torch.autograd.grad(z.sum(), model.first.weight, create_graph=True)[0]
        return z.pow(2).mean() + g.sum()

    memory = Memory()
    found = torch.tensor(replicates(model, closure, probes=100, memory=memory).traces)
    assert memory.graph
    exact = seht.exact_trace(model, closure).item()
    assert abs(found.mean() - exact) < 4 * found.std() / 100**0.5


# --- axes -----------------------------------------------------------------------------------------


def test_axis_owners():
    assert Axis(0).owners(3, 3).tolist() == [0, 1, 2]
    assert Axis(0).owners(6, 3).tolist() == [0, 1, 2, 0, 1, 2]
    assert Axis(0, inner=2).owners(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert Axis(0, owner=(2, 0)).owners(2, 3).tolist() == [2, 0]
    assert Broken("x").reason == "x"
