"""SEHT-S, layer by layer: value and gradient against an independent construction in float64.

The reference runs every example alone with its own perturbed weights and differentiates that
(``persample_reference.py``); unbiasedness is tested against the exact trace.
"""

import math

import persample_reference as reference
import pytest
import torch
from persample_cases import PROBLEMS, N, loss_fn

import seht
from seht import probes
from seht.engines.forward_only import replicates
from seht.persample import layers, products, signs

SEED = 3
every = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
QUICK = {"linear", "conv1d-same-behind", "conv2d-grouped", "transposed1d", "embedding-tied",
         "bilinear", "rnn", "views", "attention-time-first", "group_norm",
         "time-and-batch"}  # fmt: skip
one_of_each_kind = pytest.mark.parametrize(
    "problem",
    [pytest.param(p, id=p.name, marks=[] if p.name in QUICK else pytest.mark.slow)
     for p in PROBLEMS],
)  # fmt: skip


def closure_of(model, x, y):
    return lambda: loss_fn(model(x), y)


def penalised(problem, *, lean=False, **options):
    """What the penalty adds to the gradient, its record, and what it should be made from."""
    model, x, y = problem.make()
    closure = closure_of(model, x, y)
    weights = list(model.parameters())
    plain = torch.autograd.grad(closure(), weights, materialize_grads=True)
    penalty = seht.HessianTrace(
        model, weight=10.0, estimator="seht-s", params=problem.params, seed=SEED, **options
    )
    if lean:
        penalty.backward(closure)
    else:
        penalty(closure).backward()
    got = [
        (torch.zeros_like(w) if w.grad is None else w.grad) - g
        for w, g in zip(weights, plain, strict=True)
    ]
    for w in weights:
        w.grad = None
    return model, x, y, [g / 10 for g in got], penalty.last


def distance(a, b):
    over = math.sqrt(sum(float((x - y).pow(2).sum()) for x, y in zip(a, b, strict=True)))
    return over / max(1e-12, math.sqrt(sum(float(y.pow(2).sum()) for y in b)))


def signs_of(problem, model, record, **options):
    tensors = probes.choose(model, problem.params).tensors
    return reference.directions(tensors, N, record.seed, problem.shared, **options)


@every
@pytest.mark.supports("{problem.operator}", section="layers", engine="SEHT-S")
@pytest.mark.supports('`estimator="seht-s"`', engine="difference")
def test_hessian(problem):
    model, x, y, got, record = penalised(problem)
    assert set(record.shared) == problem.shared
    s = signs_of(problem, model, record)
    trace, gradient = reference.hessian(model, problem, x, y, s, loss_fn)
    assert record.trace == pytest.approx(float(trace), rel=1e-5)
    assert distance(got, gradient) < 1e-5


@every
def test_gauss_newton(problem):
    model, x, y, got, record = penalised(problem, curvature="ggn", two_sided=True, kappa=1e-4)
    s = signs_of(problem, model, record)
    trace, gradient = reference.gauss_newton(model, problem, x, y, s, loss_fn)
    assert record.trace == pytest.approx(float(trace), rel=1e-5)
    assert distance(got, gradient) < 1e-5


@every
def test_folded(problem, monkeypatch):
    """Blocks of two rows and columns: of these small layers the library's own are the whole."""
    monkeypatch.setattr(signs, "_BLOCK", 2)
    monkeypatch.setattr(products, "_WORTH", 0)
    model, x, y, got, record = penalised(problem)
    s = signs_of(problem, model, record, block=2)
    trace, gradient = reference.hessian(model, problem, x, y, s, loss_fn)
    assert record.trace == pytest.approx(float(trace), rel=1e-5)
    assert distance(got, gradient) < 1e-5
    exact = float(seht.exact_trace(model, closure_of(model, x, y), params=problem.params))
    closure = closure_of(model, x, y)
    found = torch.tensor(replicates(model, closure, params=problem.params, probes=60).traces)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - exact) < 4 * error + 1e-6 * abs(exact)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("per_layer", [False, True])
def test_folding_changes_no_number(stride, per_layer, monkeypatch):
    """The block's product and that with the whole S are one, with and without a graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Tanh(),
        torch.nn.Conv2d(16, 24, 3, stride=stride), torch.nn.Tanh(),
        torch.nn.Flatten(), torch.nn.LazyLinear(20), torch.nn.Tanh(), torch.nn.Linear(20, 12),
    )  # fmt: skip
    x = torch.randn(N, 3, 6, 6)
    model(x)
    model.double()

    def closure():
        return model(x.double()).square().sum(1).mean()

    folded, fold = [], [True]

    def second(op, x, block, whole, into, out):
        found = products.second(op, x, block, whole, into, out)
        folded.append(isinstance(found, products.Folded))
        return found if fold[0] else products.Signed(op, whole(), into, out)

    monkeypatch.setattr(layers, "second", second)
    monkeypatch.setattr(products, "_WORTH", 0)
    traces = []
    for fold[0] in (True, False):
        traces.append(replicates(model, closure, per_layer=per_layer).traces)
    assert folded.count(True) >= len(folded) / 2
    assert traces[0] == pytest.approx(traces[1], rel=1e-6)


@pytest.mark.parametrize("channels", [(3, 8), (8, 5), (17, 4), (4, 17)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_gradient_in_the_input_alone(rank, channels):
    into, out = channels
    x = torch.randn(2, into, *([7] * rank), dtype=torch.float64)
    w = torch.randn(out, into, *([3] * rank), dtype=torch.float64)
    for stride, padding, dilation in [(1, 1, 1), (1, 0, 2), (1, 3, 1), (2, 1, 1), (1, 4, 2)]:
        settings = [[value] * rank for value in (stride, padding, dilation)]
        op = products.Convolution(*settings, False, [0] * rank, 1)
        leaf = x.clone().requires_grad_()
        y = op.forward(leaf, w, None)
        g = torch.randn_like(y)
        (wanted,) = torch.autograd.grad(y, leaf, g)
        torch.testing.assert_close(op.back(g, x, w), wanted)


@one_of_each_kind
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_lean(problem, curvature):
    scalar, lean = (penalised(problem, lean=lean, curvature=curvature) for lean in (False, True))
    assert lean[4].trace == pytest.approx(scalar[4].trace, rel=1e-9)
    assert distance(lean[3], scalar[3]) < 1e-4


@one_of_each_kind
def test_unbiased(problem):
    """The mean of many probes is the exact trace, within its error."""
    model, x, y = problem.make()
    closure = closure_of(model, x, y)
    exact = float(seht.exact_trace(model, closure, params=problem.params))
    found = torch.tensor(replicates(model, closure, params=problem.params, probes=60).traces)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - exact) < 4 * error + 1e-6 * abs(exact)
    assert error < abs(exact) + 3  # or the line above says nothing
