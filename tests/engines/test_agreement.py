"""The two engines in float64: value and gradient, over every parameter and input.

The reference is the ``autograd`` engine, which is itself compared with plain first-order gradients
elsewhere. What is left at the difference engine's own step is its rounding: 2e-6 of tr(H)'s
gradient at most, and 3e-5 of the one-sided tr(G)'s (a ResNet's, 1e-5 for everything else).
"""

import cases
import pytest
import torch
from reference import SEED, Fixture, gradient, relative

import seht
from seht import probes

HESSIAN, GGN = {}, {"curvature": "ggn"}
TWO_SIDED = {"curvature": "ggn", "two_sided": True}
CURVATURES = {"hessian": HESSIAN, "ggn": GGN, "ggn-two-sided": TWO_SIDED}
NETWORKS = ["resnet18", "resnet18-silu", "wrn10", "lstm", "gru", "gpt", "vit", "mlp"]


def estimate(fixture, engine, **options):
    if engine == "autograd":
        options.pop("two_sided", None)
    trace = seht.hessian_trace(
        fixture.model,
        fixture.closure,
        estimator=fixture.estimator,
        engine=engine,
        seed=SEED,
        **options,
    )
    return trace.item(), gradient(trace, fixture.leaves)


def errors(fixture, truth, **options):
    value, g = estimate(fixture, "difference", **options)
    return abs(value / truth[0] - 1), relative(g, truth[1])


@pytest.mark.parametrize("case", cases.CASES, ids=str)
@pytest.mark.supports("{case.operator}", section="{case.section}", engine="difference")
def test_hessian(case):
    fixture = Fixture(case)
    value, g = errors(fixture, estimate(fixture, "autograd"))
    # This ReLU ResNet's trace, 2, is what is left of parts in the thousands.
    assert value < (5e-4 if case.id == "resnet18" else 1e-5)
    assert g < 1e-5


@pytest.mark.parametrize("case", cases.CASES, ids=str)
@pytest.mark.supports(
    "{case.operator}", section="{case.section}", engine=("difference ggn", "autograd ggn")
)
def test_gauss_newton(case):
    fixture = Fixture(case)
    truth = estimate(fixture, "autograd", **GGN)
    value, g = errors(fixture, truth, **GGN)
    assert value < 5e-5
    assert g < 5e-5
    # The bigger step that a second side allows leaves less rounding.
    value, g = errors(fixture, truth, **TWO_SIDED, kappa=1e-4)
    assert value < 1e-5
    assert g < 1e-5


# --- the error is that of a difference --------------------------------------------------------

SMOOTH = ["resnet18-silu", "wrn10-silu", "lstm", "gru", "gpt", "vit", "mlp-tanh", "LayerNorm"]
FROZEN = ["resnet18", "wrn10", "MaxPool2d", "activation-Softsign", "loss-huber"]


@pytest.mark.parametrize("name", CURVATURES)
@pytest.mark.parametrize("id", [*SMOOTH, *FROZEN])
def test_halving_the_step(id, name):
    """tr(H) and the two-sided tr(G) are of second order in the step, the one-sided of first."""
    fixture, options = Fixture(cases.find(id)), CURVATURES[name]
    truth = estimate(fixture, "autograd", **options)
    pairs = [errors(fixture, truth, **options, kappa=kappa) for kappa in (2e-3, 1e-3)]
    ratio = 2 if name == "ggn" else 4
    for coarse, fine in zip(*pairs, strict=True):
        assert coarse / fine == pytest.approx(ratio, rel=0.05)


# --- both forms, several probes, SEHT-D -------------------------------------------------------


def penalised(case, engine, *, lean=False, **options):
    """What a penalised step adds to .grad, and its record."""
    fixture = Fixture(case)
    penalty = seht.HessianTrace(fixture.model, weight=10.0, engine=engine, seed=3, **options)
    if lean:
        penalty.backward(fixture.closure)
    else:
        penalty(fixture.closure).backward()
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in fixture.leaves]
    return grads, penalty.last


OPTIONS = {
    "hessian": HESSIAN,
    "ggn": GGN,
    "probes": {"probes": 3},
    "ggn-probes": {"curvature": "ggn", "probes": 3},
    "seht-d": {"estimator": "seht-d", "prob": 0.3, "layer_prob": 0.9},
    "seht-d-ggn": {"estimator": "seht-d", "prob": 0.3, "layer_prob": 0.9, "curvature": "ggn"},
    "gaussian": {"distribution": "gaussian"},
    "limit": {"limit": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("id", NETWORKS)
@pytest.mark.supports("the lean form, `penalty.backward`", engine="difference")
def test_both_forms(id, name):
    case, options = cases.find(id), OPTIONS[name]
    truth, record = penalised(case, "autograd", **options)
    assert record.layers
    tolerance = 5e-5 if "ggn" in name else 1e-5
    for lean in (False, True):
        ours, ours_record = penalised(case, "difference", lean=lean, **options)
        assert ours_record.layers == record.layers
        assert ours_record.loss == pytest.approx(record.loss, rel=1e-12)
        assert ours_record.trace == pytest.approx(record.trace, rel=5e-5)
        assert relative(ours, truth) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_both_forms_of_every_case(case, curvature):
    truth, record = penalised(case, "autograd", curvature=curvature)
    for lean in (False, True):
        ours, ours_record = penalised(case, "difference", lean=lean, curvature=curvature)
        assert ours_record.trace == pytest.approx(record.trace, rel=5e-5)
        assert relative(ours, truth) < 5e-5


@pytest.mark.parametrize("id", ["resnet18", "lstm", "gpt"])
def test_every_single_layer(id):
    """As SEHT-D draws them: what comes before the layer is replayed and changes nothing."""
    fixture = Fixture(cases.find(id))
    for name in probes.choose(fixture.model).tensors:
        options = {"params": [name], "seed": 3}
        model, closure = fixture.model, fixture.closure
        exact = seht.hessian_trace(model, closure, engine="autograd", **options)
        ours = seht.hessian_trace(model, closure, engine="difference", **options)
        assert ours.item() == pytest.approx(exact.item(), rel=1e-4), name
        a, b = (gradient(t, fixture.leaves) for t in (ours, exact))
        assert relative(a, b) < 1e-4, name


def test_these_checks_can_fail(monkeypatch):
    """Without the rules for ReLU the difference is another object, whatever the step."""
    from seht.replay import mode

    fixture = Fixture(cases.find("resnet18"))
    truth = estimate(fixture, "autograd")
    assert errors(fixture, truth, kappa=1e-2)[1] < 0.05
    free = {f: rule for f, rule in mode.KINKS.items() if f is not torch.nn.functional.relu}
    monkeypatch.setattr(mode, "KINKS", free)
    assert errors(fixture, truth, kappa=1e-2)[1] > 1
