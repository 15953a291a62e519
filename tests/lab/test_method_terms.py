"""The terms of the loss against formulas written another way."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import IMAGE, TEXT, Trainer

from seht.lab.methods.base import Batch, Forward
from seht.lab.methods.features import last_spatial, squared_cosines
from seht.lab.methods.loss import cross_entropy
from seht.lab.methods.settings import LabelSmoothing
from seht.lab.methods.terms import (
    ConfidencePenalty,
    Jacobian,
    NontargetUniform,
    fisher_trace,
    nontarget_divergence,
    squared_jacobian,
)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def examples(count=5):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64)
    return x, torch.arange(count) % 4


def forward_of(model, x, y):
    logits = model(x)
    return Forward(model, Batch(x, y), logits, F.cross_entropy(logits, y))


# --- Jacobian ---------------------------------------------------------------------------------


def jacobian_by_func(model, x):
    """Half the mean squared Frobenius norm, from torch.func."""
    one = torch.func.jacrev(lambda x: model(x[None])[0])
    return torch.func.vmap(one)(x).square().sum() / len(x) / 2


def test_jacobian_with_all_projections_is_exact_and_so_is_its_gradient():
    model, (x, y) = network(), examples()
    x.requires_grad_()
    term = Jacobian(weight=0.3, projections=0).term(forward_of(model, x, y))
    exact = 0.3 * jacobian_by_func(model, x)
    torch.testing.assert_close(term, exact)
    weights = [p for p in model.parameters() if p.dim() > 1]
    ours, theirs = torch.autograd.grad(term, weights), torch.autograd.grad(exact, weights)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("projections", [1, 3])
def test_random_projections_are_unbiased(projections):
    model, (x, _) = network(), examples()
    x.requires_grad_()
    z = model(x)
    drawn = torch.stack([squared_jacobian(x, z, projections).detach() for _ in range(600)])
    error = drawn.std() / math.sqrt(len(drawn))
    assert (drawn.mean() - 2 * jacobian_by_func(model, x)).abs() < 4 * error
    assert error < 0.1 * drawn.mean()


# --- entropies and divergences ----------------------------------------------------------------


def test_confidence_penalty_is_minus_the_entropy():
    logits = torch.randn(6, 4, dtype=torch.float64)
    term = ConfidencePenalty(weight=0.2).term(Forward(None, None, logits, None))
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    torch.testing.assert_close(term, -0.2 * entropy)


def test_confidence_penalty_prefers_doubt():
    method = ConfidencePenalty(weight=0.2)
    sure, unsure = torch.tensor([[9.0, 0, 0, 0]]), torch.zeros(1, 4)
    assert method.term(Forward(None, None, unsure, None)) < method.term(
        Forward(None, None, sure, None)
    )


def test_nontarget_divergence_against_torch_kl():
    logits, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 4
    found = nontarget_divergence(logits, y)
    for i in range(6):
        wrong = logits[i].softmax(0)[[k for k in range(4) if k != y[i]]]
        q, u = wrong / wrong.sum(), torch.full((3,), 1 / 3, dtype=torch.float64)
        torch.testing.assert_close(found[i], F.kl_div(q.log(), u, reduction="sum"))


def test_nontarget_term_mixes_with_the_labels():
    logits, y, other = torch.randn(6, 4), torch.arange(6) % 4, torch.arange(1, 7) % 4
    forward = Forward(None, Batch(None, y, other, 0.3), logits, None)
    a, b = (nontarget_divergence(logits, labels).mean() for labels in (y, other))
    torch.testing.assert_close(NontargetUniform(weight=2).term(forward), 2 * (0.3 * a + 0.7 * b))


# --- label smoothing and mixed labels ---------------------------------------------------------


@pytest.mark.parametrize("weight", [0.01, 0.1, 1.0])
def test_label_smoothing_is_the_papers_weighting_up_to_a_factor(weight):
    logits, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 4
    paper = F.cross_entropy(logits, y) + weight * -logits.log_softmax(1).mean()
    ours = cross_entropy(logits, Batch(None, y), LabelSmoothing(weight=weight).smoothing)
    torch.testing.assert_close((1 + weight) * ours, paper)


def test_label_smoothing_by_its_epsilon():
    assert LabelSmoothing(eps=0.1).smoothing == 0.1


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixed_labels_are_soft_targets(smoothing):
    logits = torch.randn(6, 4, dtype=torch.float64)
    y, other = torch.arange(6) % 4, torch.arange(3, 9) % 4
    hot = [F.one_hot(labels, 4).double() for labels in (y, other)]
    soft = (1 - smoothing) * (0.3 * hot[0] + 0.7 * hot[1]) + smoothing / 4
    found = cross_entropy(logits, Batch(None, y, other, 0.3), smoothing)
    torch.testing.assert_close(found, F.cross_entropy(logits, soft))


@pytest.mark.parametrize("recipe", [IMAGE, TEXT], ids=lambda r: r.task)
def test_aux_has_the_plain_cross_entropy(recipe):
    trainer = Trainer("label-smoothing+confidence-penalty", recipe)
    trainer.model.eval()  # the same pass twice
    batch = trainer.data[0]
    loss, aux = trainer.closure(batch)()
    output = trainer.model(batch.x)
    logits = output if recipe.task == "image" else output[0].flatten(0, 1)
    torch.testing.assert_close(aux["loss"], F.cross_entropy(logits, batch.y.flatten()))
    smooth = F.cross_entropy(logits, batch.y.flatten(), label_smoothing=0.1 / 1.1)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    torch.testing.assert_close(loss, smooth - 0.1 * entropy)
    assert not aux["loss"].requires_grad and loss.requires_grad
    if recipe.task == "text":
        assert all(
            torch.equal(a, b) and not a.requires_grad
            for a, b in zip(aux["hidden"], output[1], strict=True)
        )


# --- features and Fisher ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 7, 2, 2)], ids=["wide", "deep"])
def test_squared_cosines_against_torch(shape):
    maps = torch.randn(shape, dtype=torch.float64)
    rows, pairs = maps.flatten(2), list(itertools.combinations(range(shape[1]), 2))
    cosines = [F.cosine_similarity(rows[:, i], rows[:, j], dim=1) for i, j in pairs]
    exact = torch.stack(cosines).square().mean(0)
    torch.testing.assert_close(squared_cosines(maps, fade=0), exact)
    torch.testing.assert_close(squared_cosines(maps), exact, rtol=0.1, atol=0)


def test_squared_cosines_of_copies_and_of_dead_channels():
    a = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    copies = squared_cosines(a.expand(1, 4, 3, 3), fade=0)
    torch.testing.assert_close(copies, torch.ones(1, dtype=torch.float64))
    dead = torch.cat([a, torch.zeros_like(a)], 1).requires_grad_()
    value = squared_cosines(dead)
    value.sum().backward()
    assert value.abs() < 1e-12 and dead.grad.isfinite().all()


@pytest.mark.parametrize(("name", "place"), [("resnet18", "layers"), ("wrn", "norm")])
def test_the_last_feature_map(name, place):
    from seht.lab import models

    model = models.resnet18(width=4) if name == "resnet18" else models.WideResNet(10, 1, width=4)
    assert last_spatial(model) is getattr(model, place)


def test_fisher_expectation_is_the_exact_trace():
    """The mean over every choice of labels, each with its probability, in place of a sample."""
    model, (x, _) = network(), examples(3)
    weights = [p for p in model.parameters() if p.dim() > 1]
    p = model(x).softmax(1).detach()
    exact = sum(
        p[i, k]
        * sum(g.square().sum() for g in torch.autograd.grad(model(x)[i].log_softmax(0)[k], weights))
        for i in range(3)
        for k in range(4)
    ) / len(x)
    expectation = 0.0
    for labels in itertools.product(range(4), repeat=3):
        probability = math.prod(p[i, k].item() for i, k in enumerate(labels))
        expectation += probability * fisher_trace(model(x), weights, torch.tensor(labels)).item()
    assert expectation == pytest.approx(exact.item(), rel=1e-10)


def test_fisher_draws_its_labels_from_the_model():
    model, (x, _) = network(), examples(3)
    weights = [p for p in model.parameters() if p.dim() > 1]
    with torch.no_grad():
        model[-1].bias[2] = 60  # certain of class 2
    drawn, sure = (fisher_trace(model(x), weights, y) for y in (None, torch.full((3,), 2)))
    torch.testing.assert_close(drawn, sure)
