"""What must hold on every network: probes, quadratic forms, and unbiased estimates."""

import math
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import networks
from reference import gradient, hessian, norm, quadratic_form, written_out
from torch import nn

import seht
from seht import probes
from seht.course import make_task

# Error of one probe's value, relative to the sum of |H|, and of its gradient; then the rounding
# that remains where there is no curvature (of a value, of a gradient, without norms). Nearly
# singular norms make some of these networks bend within a step of 1e-4.
ENGINES = {"autograd": (1e-9, 1e-12, 1e-10), "difference": (1e-3, 1e-9, 1e-5)}
SEEDS = st.integers(0, 2**62)


def chosen(model, params=None):
    return probes.choose(model, params).tensors


def drawn(model, estimator, seed):
    """The probes of a step, each as one vector over all chosen weights: 0 where not drawn."""
    task = make_task(model, lambda: None, probes.choose(model), estimator, seed)
    zeros = {name: torch.zeros(w.numel()).double() for name, w in chosen(model).items()}
    if task is None:
        return [torch.cat(list(zeros.values()))]
    return [
        torch.cat([p[n].double().flatten() if n in p else zero for n, zero in zeros.items()])
        for p in task.probes()
    ]


def explicit_hessian(model, closure, params=None):
    """By plain nested autograd, the norms written out."""
    weights = list(chosen(model, params).values())
    with written_out(model):
        return hessian(closure(), weights)


# --- one probe --------------------------------------------------------------------------------


STEPS = {"autograd": [{}], "difference": [{}, {"kappa": 1e-5}, {"kappa": 1e-6}]}
"""A norm over two or three numbers may bend within the engine's own step: then a smaller one."""


@pytest.mark.parametrize("engine", ENGINES)
@given(network=networks(), seed=SEEDS)
def test_a_probe_over_all_layers_gives_its_quadratic_form(engine, network, seed):
    model, closure = network.build()
    (s,) = drawn(model, seht.SehtH(), seed)
    h = explicit_hessian(model, closure)
    rounding = 1e-12 * network.magnification
    torch.testing.assert_close(h, h.t(), rtol=1e-7, atol=1e-9 * float(h.abs().max()) + rounding)
    relative, floor, _ = ENGINES[engine]
    floor *= network.magnification
    errors = (
        abs(seht.hessian_trace(model, closure, engine=engine, seed=seed, **step).item() - s @ h @ s)
        for step in STEPS[engine]
    )
    assert any(error <= relative * h.abs().sum() + floor for error in errors)


@pytest.mark.parametrize("engine", ENGINES)
@given(network=networks(), seed=SEEDS)
def test_so_does_its_gradient(engine, network, seed):
    model, closure = network.build()
    leaves = list(model.parameters())
    weights = list(chosen(model).values())
    (s,) = drawn(model, seht.SehtH(), seed)
    parts = s.split([w.numel() for w in weights])
    parts = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
    with written_out(model):
        truth = gradient(quadratic_form(closure(), weights, parts), leaves)
    relative, _, floor = ENGINES[engine]

    def error(step):
        ours = seht.hessian_trace(model, closure, engine=engine, seed=seed, **step)
        return norm([a - b for a, b in zip(gradient(ours, leaves), truth, strict=True)])

    bound = relative * norm(truth) + floor * network.magnification
    assert any(error(step) <= bound for step in STEPS[engine])


@given(network=networks(), seed=SEEDS, prob=st.floats(0.1, 0.5), count=st.integers(1, 3))
def test_seht_d_is_the_mean_form_over_what_it_draws(network, seed, prob, count):
    model, closure = network.build()
    options = {"estimator": "seht-d", "prob": prob, "layer_prob": 0.7, "probes": count}
    t, rescaled = (
        seht.hessian_trace(model, closure, engine="autograd", seed=seed, rescale=r, **options)
        for r in (False, True)
    )
    h = explicit_hessian(model, closure)
    forms = [
        s @ h @ s for s in drawn(model, seht.SehtD(prob=prob, layer_prob=0.7, probes=count), seed)
    ]
    assert abs(t.item() - sum(forms).item() / len(forms)) <= 1e-9 * float(h.abs().sum()) + 1e-12
    assert rescaled.item() == pytest.approx(t.item() / (2 * 0.7 * prob), rel=1e-12, abs=1e-12)


# --- the trace --------------------------------------------------------------------------------


class EverySign:
    """All 2^n sign vectors as the probes of one estimate, whose mean is the trace exactly."""

    name, scale, signs = "every-sign", 1.0, False

    def __init__(self, sizes, seed):
        vectors = [torch.tensor(v) for v in product((-1, 1), repeat=sum(sizes))]
        self.probes = len(vectors)
        self.parts = {
            probes.entry_seed(seed, k, i): part
            for k, vector in enumerate(vectors)
            for i, part in enumerate(vector.split(sizes))
        }

    def layers(self, count, seed):
        return tuple(range(count))

    def entries(self, shape, seed, device):
        return self.parts[seed].view(shape)


@given(network=networks(max_depth=2, max_width=2))
def test_the_mean_over_all_sign_vectors_is_the_trace(network):
    model, closure = network.build()
    params, entries = [], 0
    for name, weight in sorted(chosen(model).items(), key=lambda item: item[1].numel()):
        entries += weight.numel()
        if entries <= 8:  # 256 probes are enough
            params.append(name)
    assume(params)
    sizes = [w.numel() for w in chosen(model, params).values()]
    with torch.no_grad():
        mean = seht.hessian_trace(
            model, closure, estimator=EverySign(sizes, 5), params=params, seed=5, engine="autograd"
        )
    h = explicit_hessian(model, closure, params)
    exact = seht.exact_trace(model, closure, params=params)
    rounding = 1e-10 * h.abs().sum() + 1e-12 * network.magnification
    assert abs(exact - h.trace()) <= rounding
    assert abs(mean - exact) <= rounding


# A mean of N estimates may be off by Z standard errors, the deviation of one estimate being known
# exactly from H. The same networks each time: a bound of this kind must not fail by chance.
Z, N = 6, 150
statistical = settings(derandomize=True, max_examples=max(20, settings().max_examples // 4))


def assert_unbiased(estimates, mean, variance):
    error = math.sqrt(max(variance, 0.0) / len(estimates))
    assert abs(sum(estimates) / len(estimates) - mean) <= Z * error + 1e-9 * (1 + abs(mean))


@statistical
@given(network=networks(), seed=SEEDS)
def test_seht_h_is_unbiased(network, seed):
    model, closure = network.build()
    h = explicit_hessian(model, closure)
    variance = 2 * float((h**2).sum() - (h.diagonal() ** 2).sum())
    with torch.no_grad():
        estimates = [
            seht.hessian_trace(model, closure, engine="autograd", probes=N // 5, seed=seed + i)
            for i in range(5)
        ]
    assert_unbiased(
        [e.item() for e in estimates],
        seht.exact_trace(model, closure).item(),
        variance / (N // 5),
    )


def moments(model, keep, prob):
    """E[a_i^2 a_j^2] of SEHT-D's probes a: entries of one layer come and go together."""
    layer = torch.cat([torch.full([w.numel()], i) for i, w in enumerate(chosen(model).values())])
    same = (layer[:, None] == layer).double()
    m = same * keep * (2 * prob) ** 2 + (1 - same) * (2 * keep * prob) ** 2
    return m.fill_diagonal_(2 * keep * prob)


@statistical
@given(
    network=networks(),
    seed=SEEDS,
    prob=st.floats(0.15, 0.5),
    keep=st.floats(0.3, 1.0),
    rescale=st.booleans(),
)
def test_seht_d_estimates_2_p1_p2_times_the_trace(network, seed, prob, keep, rescale):
    model, closure = network.build()
    h, m, q = explicit_hessian(model, closure), moments(model, keep, prob), 2 * keep * prob
    d = h.diagonal()
    second = d @ m @ d + 2 * ((h**2 * m).sum() - d**2 @ m.diagonal())
    scale = 1 / q if rescale else 1.0
    with torch.no_grad():
        estimates = [
            seht.hessian_trace(
                model, closure, engine="autograd", seed=seed + i,
                estimator=seht.SehtD(prob=prob, layer_prob=keep, rescale=rescale),
            ).item()
            for i in range(N)
        ]  # fmt: skip
    trace = seht.exact_trace(model, closure).item()
    assert_unbiased(estimates, scale * q * trace, scale**2 * float(second - (q * h.trace()) ** 2))


@statistical
@given(prob=st.floats(0.05, 0.5), keep=st.floats(0.1, 1.0), seed=SEEDS)
def test_moments_of_q(prob, keep, seed):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 2))
    estimator = seht.SehtD(prob=prob, layer_prob=keep)
    a = torch.stack([drawn(model, estimator, seed + i)[0] for i in range(400)])
    q, m = 2 * keep * prob, moments(model, keep, prob)
    eye = torch.eye(a.shape[1]).double()
    outer = (a[:, :, None] * a[:, None, :]).mean(0)
    squares = (a[:, :, None] ** 2 * a[:, None, :] ** 2).mean(0)
    # E[a] = 0, E[a a^T] = q I, E[a_i^2 a_j^2] = M; the variances follow from a^4 = a^2.
    floor = 1e-12
    assert (a.mean(0).abs() <= Z * math.sqrt(q / len(a))).all()
    assert ((outer - q * eye).abs() <= Z * ((m - (q * eye) ** 2) / len(a)).sqrt() + floor).all()
    assert ((squares - m).abs() <= Z * ((m - m**2) / len(a)).sqrt() + floor).all()


# --- seeds ------------------------------------------------------------------------------------


class Inside(nn.Module):
    """A wrapper that puts ``module.`` before every name, as data parallel ones do."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args):
        return self.module(*args)


ESTIMATORS = st.sampled_from(
    [
        seht.SehtH(),
        seht.SehtH(probes=2),
        seht.SehtH(distribution="gaussian"),
        seht.SehtD(prob=0.3, layer_prob=0.8),
    ]
)


@given(network=networks(), seed=SEEDS, estimator=ESTIMATORS)
def test_a_seed_draws_the_same_probe_in_every_dtype_and_wrapper(network, seed, estimator):
    model, closure = network.build()
    probe = drawn(model, estimator, seed)
    value = seht.hessian_trace(model, closure, estimator=estimator, seed=seed, engine="autograd")
    wrapped = Inside(Inside(model))
    assert torch.equal(
        value,
        seht.hessian_trace(wrapped, closure, estimator=estimator, seed=seed, engine="autograd"),
    )
    for other in (wrapped, *(network.build(dtype)[0] for dtype in (torch.float32, torch.bfloat16))):
        assert all(
            torch.equal(a, b) for a, b in zip(probe, drawn(other, estimator, seed), strict=True)
        )


@given(network=networks(), seed=SEEDS, step=st.integers(0, 5))
def test_a_step_s_estimate_can_be_repeated_from_its_seed(network, seed, step):
    model, closure = network.build()
    penalty = seht.HessianTrace(model, weight=0.1, seed=seed, engine="autograd", probes=2)
    for _ in range(step + 1):
        penalty(closure)
    again = seht.hessian_trace(model, closure, seed=penalty.last.seed, engine="autograd", probes=2)
    assert again.item() == pytest.approx(penalty.last.trace, rel=1e-12)


# Without norms, which magnify rounding without bound where a feature hardly varies.
@given(network=networks(norms=["none", "batch-eval"]), seed=SEEDS)
def test_float32_agrees_with_float64(network, seed):
    (model, closure), (single, single_closure) = network.build(), network.build(torch.float32)
    h = explicit_hessian(model, closure)
    a = seht.hessian_trace(model, closure, seed=seed, engine="autograd").item()
    b = seht.hessian_trace(single, single_closure, seed=seed, engine="autograd").item()
    assert abs(a - b) <= 1e-3 * float(h.abs().sum()) + 1e-5
