"""PyHessian, hessian-eigenthings and curvlinops agree with us, and all with the exact Hessian.

``pip install 'seht[crosscheck]'``; each test is skipped where its package is missing.
"""

import math

import pytest
import torch
from curved_problems import data, exact_hessian, loss_fn, network
from torch import nn

from seht import measure

NETWORKS = {"relu": nn.ReLU, "tanh": nn.Tanh}
every_network = pytest.mark.parametrize("activation", NETWORKS.values(), ids=NETWORKS)


def frozen_biases(activation):
    """The others take every parameter that trains, we those of two or more dimensions."""
    model = network(activation)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() >= 2)
    return model


def three_ways(model, batch):
    """Our trace, top eigenvalues and the exact Hessian."""
    exact = exact_hessian(model, batch)
    trace = measure.trace(model, loss_fn, batch, tol=0.05, micro_batch=12)
    ends = measure.eigenvalues(model, loss_fn, batch, largest=3, smallest=1)
    values = torch.linalg.eigvalsh(exact)
    assert abs(trace.estimate - float(exact.trace())) < 4 * trace.stderr
    assert ends.largest == pytest.approx(values.flip(0)[:3].tolist(), rel=1e-3)
    return trace, ends, exact


def agree(ours, theirs, error):
    return abs(ours.estimate - theirs) < 4 * math.hypot(ours.stderr, error)


@every_network
def test_pyhessian(activation):
    pyhessian = pytest.importorskip("pyhessian")
    model, (x, y) = frozen_biases(activation), data()
    trace, ends, _ = three_ways(model, (x, y))
    theirs = pyhessian.hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=False)
    values = torch.tensor(theirs.trace(maxIter=600, tol=-math.inf))
    assert len(values) > 100
    assert agree(trace, float(values.mean()), float(values.std() / math.sqrt(len(values))))
    top, _ = theirs.eigenvalues(maxIter=1000, tol=1e-9, top_n=2)
    assert ends.largest[:2] == pytest.approx(top, rel=1e-3)
    # Its density calls torch.eig, which PyTorch no longer has.


@every_network
@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_hessian_eigenthings(activation, method):
    things = pytest.importorskip("hessian_eigenthings")
    model, batch = frozen_biases(activation), data()
    trace, ends, exact = three_ways(model, batch)
    operator = things.HessianOperator(model, [batch], loss_fn)
    v = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(operator.matvec(v), exact @ v)
    theirs = things.trace(operator, num_matvecs=90, method=method, seed=0)
    assert agree(trace, theirs.estimate, theirs.stderr)
    top = things.lanczos(operator, k=3, seed=0).eigenvalues
    largest = sorted((float(t) for t in top), reverse=True)
    assert largest[0] == pytest.approx(ends.largest[0], rel=1e-3)


@every_network
def test_hessian_eigenthings_gauss_newton(activation):
    things = pytest.importorskip("hessian_eigenthings")
    model, batch = frozen_biases(activation), data()
    operator = things.GGNOperator(
        model,
        [batch],
        things.supervised_forward,
        things.supervised_loss_of_output(nn.functional.cross_entropy),
    )
    theirs = things.trace(operator, num_matvecs=192, method="hutch++", seed=0)
    ours = measure.trace(model, loss_fn, batch, curvature="ggn", tol=0.03, micro_batch=12)
    assert agree(ours, theirs.estimate, max(theirs.stderr, 1e-9))


@every_network
def test_curvlinops(activation):
    curvlinops = pytest.importorskip("curvlinops")
    model, batch = frozen_biases(activation), data()
    trace, _, exact = three_ways(model, batch)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    try:
        operator = curvlinops.HessianLinearOperator(
            model, nn.CrossEntropyLoss(), params, [batch], check_deterministic=False
        )
    except (AttributeError, TypeError):  # before 3.0: a list
        operator = curvlinops.HessianLinearOperator(
            model, nn.CrossEntropyLoss(), list(params.values()), [batch], check_deterministic=False
        )
    matrix = operator @ torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(matrix, exact)
    torch.manual_seed(0)
    theirs = torch.stack([curvlinops.hutchinson_trace(operator, 10) for _ in range(20)])
    assert agree(trace, float(theirs.mean()), float(theirs.std()) / math.sqrt(20))
    better = torch.stack([curvlinops.hutchpp_trace(operator, 30) for _ in range(10)])
    assert agree(trace, float(better.mean()), float(better.std()) / math.sqrt(10))
