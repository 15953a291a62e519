"""The reference is right where fused operators come in by another door, or it refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import gradient, relative
from torch import nn
from torch.nn.utils import parametrizations

import seht
from seht.operators.safe_forms import safe_ops

aten = torch.ops.aten
STATS = [torch.zeros(4), torch.ones(4)]


def stats():
    return [t.double() for t in STATS]


GAIN = [torch.rand(4, dtype=torch.float64) + 0.5, torch.rand(4, dtype=torch.float64)]
OPERATORS = {
    "batch_norm": lambda x: aten.batch_norm(x, *GAIN, None, None, True, 0.1, 1e-5, False),
    "batch_norm.default": lambda x: aten.batch_norm.default(
        x, *GAIN, *stats(), True, 0.1, 1e-5, False
    ),
    "batch_norm-eval": lambda x: aten.batch_norm(x, *GAIN, *stats(), False, 0.1, 1e-5, False),
    "native_batch_norm": lambda x: aten.native_batch_norm(x, *GAIN, *stats(), True, 0.1, 1e-5)[0],
    "torch.native_batch_norm": lambda x: torch.native_batch_norm(
        x, None, None, None, None, True, 0.1, eps=1e-5
    )[0],
    "legit": lambda x: aten._native_batch_norm_legit.default(x, *GAIN, *stats(), True, 0.1, 1e-5)[
        0
    ],
    "legit-packet": lambda x: aten._native_batch_norm_legit(x, *GAIN, True, 0.1, 1e-5)[0],
    "legit-no-stats": lambda x: aten._native_batch_norm_legit.no_stats(x, *GAIN, True, 0.1, 1e-5)[
        0
    ],
    "legit-functional": lambda x: aten._native_batch_norm_legit_functional.default(
        x, *GAIN, *stats(), True, 0.1, 1e-5
    )[0],
    "impl_index": lambda x: aten._batch_norm_impl_index(x, *GAIN, *stats(), True, 0.1, 1e-5, False)[
        0
    ],
    "with_update": lambda x: aten._batch_norm_with_update(x, *GAIN, *stats(), 0.1, 1e-5)[0],
    "with_update_functional": lambda x: aten._batch_norm_with_update_functional.default(
        x, *GAIN, *stats(), 0.1, 1e-5
    )[0],
    "no_training": lambda x: aten._native_batch_norm_legit_no_training(
        x, *GAIN, *stats(), 0.1, 1e-5
    )[0],
    "layer_norm": lambda x: aten.layer_norm.default(x, [4], *GAIN),
    "native_layer_norm": lambda x: aten.native_layer_norm.default(x, [4], *GAIN, 1e-5)[0],
    "instance_norm": lambda x: aten.instance_norm(
        x[None], None, None, None, None, True, 0.1, 1e-5, False
    ),
    "group_norm": lambda x: aten.group_norm(x, 2, *GAIN),
    "native_group_norm": lambda x: aten.native_group_norm(x, *GAIN, 6, 4, 1, 2, 1e-5)[0],
    "rms_norm": lambda x: aten.rms_norm(x, [4], GAIN[0]),
    "_weight_norm": lambda x: aten._weight_norm(x, x[:, :1].exp(), 0),
    "_weight_norm_interface": lambda x: aten._weight_norm_interface.default(x, x[:, :1].exp(), 0)[
        0
    ],
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "logcumsumexp.default": lambda x: aten.logcumsumexp.default(x, -1),
    "hardsigmoid": lambda x: aten.hardsigmoid.default(x),
    "hardsigmoid_": lambda x: aten.hardsigmoid_(x.clone()),
    "attention": lambda x: aten.scaled_dot_product_attention(x[None], x[None], x[None].sin()),
}


class Through(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.function(self.first(x)).tanh())


def problem(function):
    torch.manual_seed(0)
    model, x = Through(function).double(), torch.randn(6, 3, dtype=torch.float64)
    return model, lambda: model(x).square().sin().mean()


def plain_gradients(model, closure, sigma, step):
    """Ordinary gradients at w + step * sigma, outside of everything of ours."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, s in sigma.items():
            parameters[name].add_(s, alpha=step)
    found = gradient(closure(), list(parameters.values()))
    with torch.no_grad():
        for name, s in sigma.items():
            parameters[name].sub_(s, alpha=step)
    return [g.detach() for g in found]


def truth(model, closure, seed=0, e=1e-4):
    """s^T H s and its gradient from ordinary gradients, by differences of the fourth order."""
    draw = torch.Generator().manual_seed(seed)
    names = [n for n, p in model.named_parameters() if p.dim() > 1]
    sigma = {
        n: torch.randint(0, 2, p.shape, generator=draw).double() * 2 - 1
        for n, p in model.named_parameters()
        if n in names
    }
    at = {k: plain_gradients(model, closure, sigma, k * e) for k in (-2, -1, 0, 1, 2)}
    all_names = [n for n, _ in model.named_parameters()]
    first = [
        (8 * (a - b) - (c - d)) / (12 * e)
        for a, b, c, d in zip(at[1], at[-1], at[2], at[-2], strict=True)
    ]
    second = [
        (16 * (a + b) - (c + d) - 30 * m) / (12 * e**2)
        for a, b, c, d, m in zip(at[1], at[-1], at[2], at[-2], at[0], strict=True)
    ]
    value = sum((sigma[n] * h).sum() for n, h in zip(all_names, first, strict=True) if n in sigma)
    return sigma, value, second


def quadratic(model, closure, sigma):
    """The engine's own answer along this probe."""

    class Given(seht.SehtH):
        def entries(self, shape, seed, device):
            return next(rest)

    rest = iter(sigma.values())
    return seht.hessian_trace(model, closure, estimator=Given(), engine="autograd")


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_aten(name):
    model, closure = problem(OPERATORS[name])
    sigma, value, slope = truth(model, closure)
    ours = quadratic(model, closure, sigma)
    assert ours.item() == pytest.approx(value.item(), rel=1e-7)
    assert relative(gradient(ours, list(model.parameters())), slope) < 1e-5
    exact = seht.exact_trace(model, closure)
    torch.manual_seed(1)
    average = seht.hessian_trace(model, closure, engine="difference", probes=1, seed=3)
    reference = seht.hessian_trace(model, closure, engine="autograd", probes=1, seed=3)
    assert average.item() == pytest.approx(reference.item(), rel=1e-4)
    assert exact.isfinite()


def network(kind):
    torch.manual_seed(0)
    images = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.InstanceNorm2d(4))
    rows = (nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    model = nn.Sequential(*images, *rows).double()
    return model.train(kind != "eval"), torch.randn(5, 3, 6, 6, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_models(kind, decomposed):
    """As ``torch.export`` leaves it: the same trace, gradient and statistics as the model."""
    model, x = network(kind)
    program = torch.export.export(copy.deepcopy(model), (x,))
    exported = (program.run_decompositions() if decomposed else program).module()
    y = torch.arange(5) % 3
    found = []
    for net in (model, exported):
        closure = lambda net=net: F.cross_entropy(net(x), y)
        torch.manual_seed(1)
        loss, trace = seht.loss_and_trace(net, closure, engine="autograd", seed=3)
        parameters = [p for _, p in sorted(net.named_parameters())]
        buffers = [b.double() for _, b in sorted(net.named_buffers())]
        exact = seht.exact_trace(net, closure, params="*8.weight")
        found.append((loss, trace, gradient(trace, parameters), buffers, exact))
    (loss, trace, slope, buffers, exact), other = found
    assert other[0].item() == pytest.approx(loss.item(), rel=1e-10)
    assert other[1].item() == pytest.approx(trace.item(), rel=1e-8)
    assert other[4].item() == pytest.approx(exact.item(), rel=1e-8)
    assert relative(other[2], slope) < 1e-7
    assert relative(other[3], buffers) < 1e-10


# --- what no mode sees ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_is_refused():
    scripted = torch.jit.script(lambda_free)
    model, closure = problem(scripted)
    for _ in range(3):  # until the profiling executor has made its graph
        closure().backward()
    with pytest.raises(RuntimeError, match=r"scripted function.*third.*engine='difference'"):
        seht.hessian_trace(model, closure, engine="autograd")
    sigma, value, _ = truth(model, closure)
    with torch.no_grad():  # the second order is right
        assert quadratic(model, closure, sigma).item() == pytest.approx(value.item(), rel=1e-7)


def lambda_free(x):
    return torch.tanh(torch.layer_norm(x, [4])) * torch.sigmoid(x)


class Hidden(nn.Module):
    """Stands for code in C++: no mode of Python's sees its operators."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return self.inner(x)


@pytest.mark.parametrize(
    ("inner", "what", "order"),
    [
        (lambda: nn.LayerNorm(4), "layer norm", 3),
        (lambda: nn.BatchNorm1d(4), "batch norm", 3),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "weight norm", 2),
    ],
    ids=["layer", "batch", "weight"],
)
def test_hidden_norms_are_refused(inner, what, order):
    model, closure = problem(Hidden(inner()).double())
    with pytest.raises(RuntimeError, match=rf"{what} .*third.*engine='difference'"):
        seht.hessian_trace(model, closure, engine="autograd")
    with pytest.raises(RuntimeError, match=what):
        seht.HessianTrace(model, weight=0.1, engine="autograd").backward(closure)
    if order == 2:
        with pytest.raises(RuntimeError, match=rf"{what} .*second"):
            seht.exact_trace(model, closure)
        with torch.no_grad(), pytest.raises(RuntimeError, match=what):
            seht.hessian_trace(model, closure, engine="autograd")
    else:
        sigma, value, _ = truth(model, closure)
        with torch.no_grad():
            assert quadratic(model, closure, sigma).item() == pytest.approx(value.item(), rel=1e-6)
        assert seht.exact_trace(model, closure).isfinite()


def test_a_hidden_norm_with_running_statistics_is_right():
    model, closure = problem(Hidden(nn.BatchNorm1d(4)).double().eval())
    sigma, value, slope = truth(model, closure)
    ours = quadratic(model, closure, sigma)
    assert ours.item() == pytest.approx(value.item(), rel=1e-7)
    assert relative(gradient(ours, list(model.parameters())), slope) < 1e-5


def test_a_norm_beside_the_weights_is_differentiated_once():
    """Its input has a gradient, but none of the drawn weights comes through it."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    model, norm = nn.Linear(3, 2).double(), Hidden(nn.LayerNorm(3).double())
    closure = lambda: model(norm(x)).square().sin().mean()
    trace = seht.hessian_trace(model, closure, engine="autograd", seed=1)
    other = seht.hessian_trace(model, closure, engine="difference", seed=1)
    assert relative(gradient(trace, [x]), gradient(other, [x])) < 1e-4


def test_running_sums_of_exponentials():
    """As PyTorch's own, masked entries included; behind the outputs nothing replaces it."""
    x = torch.randn(5, 4, dtype=torch.float64)
    x[3, 2] = -torch.inf
    for given, dim in ((x, 0), (x, -1), (x.T, 1)):
        a, b = given.clone().requires_grad_(), given.clone().requires_grad_()
        whole = torch.logcumsumexp(a, dim)
        with safe_ops():
            parts = b.logcumsumexp(dim)
        torch.testing.assert_close(parts, whole)
        assert parts.stride() == whole.stride()
        for y in (whole, parts):
            y.exp().sin().sum().backward()
        torch.testing.assert_close(b.grad, a.grad)
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(6, 3, dtype=torch.float64)

    def cox():
        risk = model(x).sinh().flatten()
        return (risk.logcumsumexp(0) - risk).mean()

    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn")
    with pytest.raises(RuntimeError, match=r"logcumsumexp .*third.*engine='autograd'"):
        penalty(cox)
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", engine="autograd")
    penalty.backward(cox)
    assert all(p.grad.isfinite().all() for p in model.parameters())


# --- the loss that computes its gradient beforehand -------------------------------------------

chunked = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no linear_cross_entropy"
)


@chunked
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_in_chunks(reduction):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(5, 4), "head": nn.Linear(4, 3)}).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3

    def closure(options):
        h, head = model["body"](x).tanh(), model["head"]
        return F.linear_cross_entropy(
            h, head.weight, y, linear_bias=head.bias, options=options, reduction=reduction
        )

    parts = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    whole = [f(model, lambda: closure(None)) for f in (seht.exact_trace, reference_of)]
    split = [f(model, lambda: closure(parts)) for f in (seht.exact_trace, reference_of)]
    for a, b in zip(split, whole, strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-10)
    parameters = list(model.parameters())
    assert relative(gradient(split[1], parameters), gradient(whole[1], parameters)) < 1e-10
    kept = nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    for engine in ("autograd", "difference"):
        found = []
        for options in (None, kept):
            model.zero_grad()
            penalty = seht.HessianTrace(model, weight=0.1, engine=engine, seed=2)
            penalty.backward(lambda options=options: closure(options))
            found.append([p.grad.clone() for p in parameters])
        assert relative(*found) < 1e-5, engine


def reference_of(model, closure):
    return seht.hessian_trace(model, closure, engine="autograd", seed=2)


@chunked
def test_its_operator_is_refused():
    from torch.nn.modules.linear_cross_entropy import _linear_cross_entropy_batch_chunked

    model = nn.Linear(4, 3).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3

    def closure():
        return _linear_cross_entropy_batch_chunked(
            x, model.weight, y, None, None, "mean", -100, 0.0, 2, "accurate", torch.float64, True,
            False, True, False,
        )[0]  # fmt: skip

    with pytest.raises(RuntimeError, match=r"linear_cross_entropy in chunks.*second"):
        seht.exact_trace(model, closure)
