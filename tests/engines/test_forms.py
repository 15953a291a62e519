"""Two forms and two engines, one gradient: in every leaf of the loss, whatever it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from stepping import (
    FORMS,
    WEIGHT,
    Drawn,
    assert_gradients,
    entropy,
    gradients,
    mlp,
    penalise,
    rows,
)
from torch import nn

import seht

# --- closures with leaves of every kind -------------------------------------------------------
# Each returns (model, closure, leaves).


def biases():
    model = mlp()
    return model, entropy(model), [*model.parameters()]


def second_module():
    model, head, (x, y) = mlp(), nn.Linear(3, 3).double(), rows()
    leaves = [*model.parameters(), *head.parameters()]
    return model, lambda: F.cross_entropy(head(model(x)).tanh(), y), leaves


def an_input():
    model, (x, y) = mlp(), rows()
    x.requires_grad_()
    return model, lambda: F.cross_entropy(model(x), y) + x.pow(3).sum(), [*model.parameters(), x]


def captured_parameters():
    model, (x, y) = mlp(), rows()
    params = list(model.parameters())
    decay = lambda: sum(p.pow(4).sum() for p in params)
    return model, lambda: F.cross_entropy(model(x), y) + 0.1 * decay(), params


def a_leaf_outside():
    model, (x, y) = mlp(), rows()
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    return model, lambda: F.cross_entropy(model(x) * scale, y), [*model.parameters(), scale]


def leaves_that_share_a_gradient():
    """Autograd hands out one tensor for both, and scaling it in place would scale it twice."""
    model, (x, y) = mlp(), rows()
    a, b = (torch.randn(8, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    return model, lambda: F.cross_entropy(model(x) + (a + b), y), [*model.parameters(), a, b]


def a_leaf_with_an_expanded_gradient():
    model, (x, y) = mlp(), rows()
    a = torch.randn(5, 3, dtype=torch.float64).requires_grad_()
    return model, lambda: F.cross_entropy(model(x), y) + a.sum(), [*model.parameters(), a]


def features_from_outside():
    model, body, (x, y) = mlp(), nn.Linear(4, 4).double(), rows()
    features = body(x).tanh()
    leaves = [*model.parameters(), *body.parameters()]
    return model, lambda: F.cross_entropy(model(features), y), leaves


def a_view_of_a_weight_from_outside():
    model, (x, y) = mlp(norm=False), rows()
    view = model[4].weight.t()
    closure = lambda: F.cross_entropy(model[2](model[0](x)) @ view, y)
    return model, closure, [*model.parameters()]


def tied_weights():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    return model, entropy(model), [*model.parameters()]


def called_twice():
    model, (x, y) = mlp(), rows()
    closure = lambda: F.cross_entropy(model(x) + model(0.5 * x).sin(), y)
    return model, closure, [*model.parameters()]


def custom_function_with_an_attribute_called_variable():
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = x
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return ctx.variable.cos() * grad

    model, (x, y) = mlp(norm=False), rows()
    closure = lambda: F.cross_entropy(model[4](Sine.apply(model[0](x))), y)
    return model, closure, [*model.parameters()]


KINDS = [
    biases, second_module, an_input, captured_parameters, a_leaf_outside,
    leaves_that_share_a_gradient, a_leaf_with_an_expanded_gradient, features_from_outside,
    a_view_of_a_weight_from_outside, tied_weights, called_twice,
    custom_function_with_an_attribute_called_variable,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"limit": 0.01}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_receives_what_nested_autograd_gives_it(kind, options, form):
    model, closure, leaves = kind()
    expected = penalise(model, closure, "autograd", **options)
    wanted = gradients(leaves)
    model, closure, leaves = kind()
    got = penalise(model, closure, form, **options)
    assert got.last.trace == pytest.approx(expected.last.trace, rel=1e-5)
    assert got.last.penalty == pytest.approx(expected.last.penalty, rel=1e-5)
    assert_gradients(gradients(leaves), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [features_from_outside, captured_parameters])
def test_the_same_where_the_prefix_is_shared(kind, form):
    model, closure, leaves = kind()
    penalise(model, closure, "autograd", estimator=Drawn(-1))
    wanted = gradients(leaves)
    model, closure, leaves = kind()
    penalise(model, closure, form, estimator=Drawn(-1), warm=True)
    assert_gradients(gradients(leaves), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_an_outer_graph_survives(form):
    model, body, (x, y) = mlp(), nn.Linear(4, 4).double(), rows()
    features = body(x).tanh()
    penalise(model, lambda: F.cross_entropy(model(features), y), form)
    if form == "lean":  # the scalar's one backward has gone through it, as a plain one would
        features.sum().backward()
    assert body.weight.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_drawn_weights_in_an_outer_graph_are_refused(form):
    """The features cannot be computed anew at other weights."""
    model, (x, y) = mlp(norm=False), rows()
    features = model[2](model[0](x))
    with pytest.raises(RuntimeError, match="before the closure"):
        penalise(model, lambda: F.cross_entropy(model[4](features), y), form)


@pytest.mark.parametrize("form", FORMS)
def test_an_input_that_is_made_inside_the_closure(form):
    """A gradient penalty differentiates in a leaf of its own, new in each run."""

    def build():
        model, (x, y) = mlp(norm=False), rows()

        def closure():
            a = x.clone().requires_grad_()
            loss = F.cross_entropy(model(a), y)
            (g,) = torch.autograd.grad(loss, a, create_graph=True)
            return loss + g.square().sum()

        return model, closure

    model, closure = build()
    penalise(model, closure, "autograd")
    wanted = gradients(model.parameters())
    model, closure = build()
    penalise(model, closure, form)
    assert_gradients(gradients(model.parameters()), wanted)


# --- what surrounds a backward ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_grad_scaler(form, scale):
    model = mlp()
    penalise(model, entropy(model), form)
    wanted = gradients(model.parameters())
    model = mlp()
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(11)
    if form == "lean":
        loss = penalty.backward(entropy(model), scaler=scaler)
    else:
        loss = penalty(entropy(model))
        scaler.scale(loss).backward()
    assert_gradients([g / scale for g in gradients(model.parameters())], wanted, rtol=1e-12)
    before = copy.deepcopy(model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    for p, old, g in zip(model.parameters(), before.parameters(), wanted, strict=True):
        torch.testing.assert_close(p, old - 0.1 * g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_there_are_added_to(form):
    model = mlp()
    penalise(model, entropy(model), form)
    wanted = gradients(model.parameters())
    model = mlp()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    penalise(model, entropy(model), form)
    assert_gradients([g - 1 for g in gradients(model.parameters())], wanted, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_what_receives_no_gradient_keeps_none(form, curvature):
    model = mlp()
    model.register_parameter("idle", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    model[0].bias.requires_grad_(False)
    penalise(model, entropy(model), form, curvature=curvature)
    assert model.idle.grad is None and model[0].bias.grad is None
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_hooks_fire_once_and_see_the_total(form, curvature):
    model, wanted = mlp(), mlp()
    penalise(wanted, entropy(wanted), form, curvature=curvature)
    seen, late = [], []
    model[0].weight.register_hook(seen.append)
    model[0].weight.register_hook(lambda g: 2 * g)
    model[4].bias.register_post_accumulate_grad_hook(lambda p: late.append(p.grad.clone()))
    penalise(model, entropy(model), form, curvature=curvature)
    assert len(seen) == 1 and len(late) == 1
    torch.testing.assert_close(seen[0], wanted[0].weight.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(model[0].weight.grad, 2 * wanted[0].weight.grad)
    torch.testing.assert_close(late[0], wanted[4].bias.grad, rtol=1e-12, atol=0)
    assert len(model[0].weight._backward_hooks) == 2


@pytest.mark.parametrize("form", FORMS)
def test_clipping(form):
    model = mlp()
    penalise(model, entropy(model), form)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    total = sum(g.norm() ** 2 for g in gradients(model.parameters())) ** 0.5
    assert total == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_sparse_gradients_are_written_out(form, curvature):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(50, 4, sparse=sparse)
        model = nn.Sequential(embedding, nn.Flatten(1), nn.Linear(8, 3)).double()
        words, y = torch.arange(12).view(6, 2) % 5, torch.arange(6) % 3
        penalty = seht.HessianTrace(model, weight=0.1, curvature=curvature, seed=0)
        closure = lambda: F.cross_entropy(model(words), y)
        if form == "lean":
            penalty.backward(closure)
        else:
            penalty(closure).backward()
        found.append((penalty.last.trace, embedding.weight.grad.to_dense()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-9)


# --- a probe without entries --------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("engine", ["difference", "autograd"])
def test_a_drawn_layer_without_an_entry(engine, curvature, form):
    """SEHT-D may keep a small layer and draw none of its entries: a trace of 0, not a nan."""
    found = {}
    for weight in (WEIGHT, 0.0):
        model = mlp()
        options = {"estimator": "seht-d", "prob": 1e-9, "layer_prob": 1.0}
        options |= {"engine": engine, "curvature": curvature, "weight": weight}
        for warm in {False, engine == "difference"}:  # which checks itself on a first step
            penalty = penalise(model, entropy(model), form, warm=warm, **options)
            assert not weight or (penalty.last.trace == 0 and penalty.last.layers)
        found[weight] = gradients(model.parameters())
    assert_gradients(found[WEIGHT], found[0.0], rtol=1e-9)
