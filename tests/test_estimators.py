"""SEHT-H, SEHT-D and users' own estimators: what they draw, their options and their errors."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn

import seht
from seht import estimators, probes

CPU = torch.device("cpu")
SHAPE = torch.Size([40, 50])
SEEDS = range(4000)


# --- what is drawn ----------------------------------------------------------------------------


def test_seht_h_takes_every_layer():
    assert seht.SehtH().layers(7, 3) == tuple(range(7))
    assert seht.SehtH().scale == 1.0


def test_seht_h_entries():
    signs = seht.SehtH().entries(SHAPE, 1, CPU)
    assert signs.dtype == torch.int8
    assert set(signs.unique().tolist()) == {-1, 1}
    normal = seht.SehtH(distribution="gaussian").entries(SHAPE, 1, CPU)
    assert normal.dtype == torch.float32
    assert abs(normal.std().item() - 1) < 0.1


@pytest.mark.parametrize("keep", [0.05, 0.3, 1.0])
def test_seht_d_keeps_each_layer_with_its_probability(keep):
    estimator = seht.SehtD(prob=0.2, layer_prob=keep)
    drawn = torch.zeros(len(SEEDS), 5)
    for i, seed in enumerate(SEEDS):
        layers = estimator.layers(5, seed)
        assert layers == tuple(sorted(set(layers)))
        drawn[i, list(layers)] = 1
    error = math.sqrt(keep * (1 - keep) / len(SEEDS))
    assert ((drawn.mean(0) - keep).abs() <= 5 * error + 1e-9).all()
    # ... and independently of the others.
    both = drawn.t() @ drawn / len(SEEDS)
    off = both[~torch.eye(5).bool()]
    error = math.sqrt(keep**2 * (1 - keep**2) / len(SEEDS))
    assert ((off - keep**2).abs() <= 5 * error + 1e-6).all()


def test_the_share_of_steps_without_a_layer_on_resnet_18():
    """21 weights: none is drawn in 81 % of the steps at p = 0.01, in 34 % at p = 0.05."""
    for prob, share in ((0.01, 0.81), (0.05, 0.34)):
        estimator = seht.SehtD(prob=prob)
        none = sum(not estimator.layers(21, seed) for seed in SEEDS) / len(SEEDS)
        assert abs(none - share) < 0.005 + 5 * math.sqrt(share * (1 - share) / len(SEEDS))


@pytest.mark.parametrize("distribution, fourth", [("rademacher", 1), ("gaussian", 3)])
def test_seht_d_entries(distribution, fourth):
    prob = 0.1
    estimator = seht.SehtD(prob=prob, distribution=distribution)
    a = estimator.entries(torch.Size([200_000]), 4, CPU).double()
    kept = a[a != 0]
    assert abs(len(kept) / len(a) - 2 * prob) < 5 * math.sqrt(0.2 * 0.8 / len(a))
    assert abs(kept.mean()) < 5 / math.sqrt(len(kept))
    assert abs((kept**2).mean() - 1) < 5 * math.sqrt(2 / len(kept))
    assert abs((kept**4).mean() - fourth) < 5 * math.sqrt(96 / len(kept))


def test_layer_prob_is_prob_if_not_given():
    assert seht.SehtD(prob=0.2).keep == 0.2
    assert seht.SehtD(prob=0.2, layer_prob=0.9).keep == 0.9


def test_scale():
    assert seht.SehtD(prob=0.05).scale == 1.0
    assert seht.SehtD(prob=0.05, rescale=True).scale == pytest.approx(200)
    assert seht.SehtD(prob=0.01, rescale=True).scale == pytest.approx(5000)
    assert seht.SehtD(prob=0.5, layer_prob=1.0, rescale=True).scale == 1.0


def test_defaults_are_the_paper_s():
    assert seht.SehtH() == seht.SehtH(probes=1, distribution="rademacher")
    assert seht.SehtD() == seht.SehtD(probes=1, prob=0.05, layer_prob=None, rescale=False)


def test_the_docstring_says_what_seht_d_estimates():
    assert "2 p₁ p₂ tr(H)" in seht.SehtD.__doc__.splitlines()[0]


@pytest.mark.parametrize("estimator", [seht.SehtH(probes=2), seht.SehtD(prob=0.1)])
def test_estimators_are_values(estimator):
    assert isinstance(estimator, seht.Estimator)
    assert copy.deepcopy(estimator) == pickle.loads(pickle.dumps(estimator)) == estimator
    assert hash(estimator) == hash(copy.deepcopy(estimator))
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.probes = 3


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [seht.SehtH, seht.SehtD])
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"probes": 0}, ValueError, "probes must be at least 1, not 0"),
        ({"probes": -3}, ValueError, "probes must be at least 1"),
        ({"probes": 1.5}, TypeError, "whole number"),
        ({"probes": True}, TypeError, "whole number"),
        ({"probes": "1"}, TypeError, "whole number"),
        ({"distribution": "rademaher"}, ValueError, "did you mean 'rademacher'"),
    ],
)
def test_bad_options_of_both(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(**options)


@pytest.mark.parametrize("name, top", [("prob", 0.5), ("layer_prob", 1.0)])
@pytest.mark.parametrize("value", [0, -0.1, "over", math.nan, math.inf, "text"])
def test_probabilities_out_of_range(name, top, value):
    value = top + 0.01 if value == "over" else value
    with pytest.raises(ValueError, match=rf"^{name} must be in \(0, {top:g}\]"):
        seht.SehtD(**{name: value})


def test_probabilities_at_the_edge():
    seht.SehtD(prob=0.5, layer_prob=1.0)
    seht.SehtD(prob=1e-6, layer_prob=1)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        seht.SehtD(1)


# --- make -------------------------------------------------------------------------------------


def test_make_by_name():
    assert estimators.make("seht-h", {}, seht.HessianTrace) == seht.SehtH()
    made = estimators.make("seht-d", {"prob": 0.1, "probes": 4}, seht.HessianTrace)
    assert made == seht.SehtD(prob=0.1, probes=4)


class Ones:
    """A user's own: one fixed direction."""

    name, probes, scale = "ones", 1, 2.0
    signs = False

    def layers(self, count, seed):
        return (count - 1,)

    def entries(self, shape, seed, device):
        return torch.ones(shape, device=device)


def test_a_user_s_own_estimator():
    own = Ones()
    assert estimators.make(own, {}, seht.HessianTrace) is own
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)).double()
    x = torch.randn(5, 2).double()
    t = seht.hessian_trace(
        model, lambda: model(x).square().mean(), estimator=own, engine="autograd"
    )
    hidden = model[0](x)
    assert t.item() == pytest.approx(2 * 2 * hidden.sum(1).square().mean().item())
    penalty = seht.HessianTrace(model, weight=0.5, estimator=own, engine="autograd")
    penalty(lambda: model(x).square().mean())
    assert penalty.last.layers == ("1.weight",)
    assert penalty.last.trace == pytest.approx(t.item())


@pytest.mark.parametrize(
    "estimator, options, error, message",
    [
        ("seht-e", {}, ValueError, r"unknown estimator 'seht-e'; did you mean 'seht-.'"),
        ("hutchinson", {}, ValueError, r"unknown estimator.*known: seht-h, seht-d"),
        ("seht-h", {"prob": 0.1}, ValueError, "prob is an option of seht-d, not of seht-h"),
        ("seht-d", {"layer_probs": 0.1}, ValueError, "did you mean 'layer_prob'"),
        ("seht-d", {"prob": 0.7}, ValueError, "prob must be in"),
        (seht.SehtD(), {"prob": 0.1}, ValueError, r"prob cannot be given beside.*object"),
        (seht.SehtD, {}, TypeError, r"estimator object such as seht.SehtH\(\)"),
        (None, {}, TypeError, "estimator must be a name"),
        (object(), {}, TypeError, "estimator must be a name"),
    ],
)
def test_bad_estimators(estimator, options, error, message):
    with pytest.raises(error, match=message):
        estimators.make(estimator, options, seht.HessianTrace)
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        seht.HessianTrace(model, weight=0.1, estimator=estimator, **options)
    with pytest.raises(error, match=message):
        seht.hessian_trace(model, lambda: model.weight.sum(), estimator=estimator, **options)


def test_a_user_s_estimator_without_probes_is_refused():
    own = Ones()
    own.probes = 0
    with pytest.raises(ValueError, match="probes must be at least 1"):
        estimators.make(own, {}, seht.HessianTrace)


# --- no layer ---------------------------------------------------------------------------------


def test_a_step_without_a_layer_is_a_zero_without_graph():
    model = nn.Linear(2, 2)
    closure = lambda: model(torch.ones(1, 2)).square().sum()
    options = {"estimator": "seht-d", "prob": 0.05}
    undrawn = lambda seed: not seht.SehtD(prob=0.05).layers(1, probes.layer_seed(seed))
    seed = next(filter(undrawn, range(100)))
    t = seht.hessian_trace(model, closure, seed=seed, **options)
    assert t.item() == 0
    assert t.dim() == 0
    assert not t.requires_grad
    loss, t = seht.loss_and_trace(model, closure, seed=seed, **options)
    assert t.item() == 0
    assert torch.equal(loss, closure())
