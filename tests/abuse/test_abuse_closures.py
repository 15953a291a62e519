"""Closures that do more than compute the loss: an error that names the fix, or the right thing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from abusing import Surroundings, assert_right, every_difference, every_way, penalty_of, run
from stepping import mlp, rows
from torch import nn

import seht


def refused(model, penalty, closure, form, error, match, **kept):
    before = Surroundings(model, penalty)
    with pytest.raises(error, match=match) as caught:
        run(penalty, closure, form)
    assert "\n" not in str(caught.value)
    Surroundings(model, penalty).assert_same(before, **kept)


@pytest.mark.supports("`backward()` inside the closure", cell="refused")
@every_way
@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("warmup", [0, 1])
def test_backward_inside(engine, form, curvature, retain, warmup):
    model, (x, y) = mlp(), rows()

    def closure():
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss, retain_graph=retain)
        return loss

    penalty = penalty_of(model, engine, curvature, warmup=warmup)
    plain = mlp()
    F.cross_entropy(plain(x), y).backward()
    with pytest.raises(RuntimeError, match=r"gradient in 0.weight.grad.*call backward\(\)"):
        run(penalty, closure, form)
    assert penalty.step == 0
    if curvature == "hessian" or form == "scalar":  # what the closure itself did, once
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


@every_difference
def test_a_backward_pass_for_the_gradient_of_an_input(form, curvature):
    """Adversarial training as it is often written."""
    x, y = rows()

    def make(model):
        def closure():
            noisy = x.clone().requires_grad_()
            F.cross_entropy(model(noisy), y).backward()
            model.zero_grad()
            return F.cross_entropy(model(x + 0.1 * noisy.grad.sign().detach()), y)

        return closure

    assert_right(lambda: mlp(norm=False), make, form, curvature, rtol=1e-4)


@every_difference
def test_a_gradient_that_the_loss_is_made_from(form, curvature):
    x, y = rows()

    def make(model):
        def closure():
            inner = x.clone().requires_grad_()
            z = model(inner)
            (g,) = torch.autograd.grad(z.square().sum(), inner, create_graph=True)
            return F.cross_entropy(z, y) + g.square().mean()

        return closure

    assert_right(lambda: mlp(norm=False), make, form, curvature)


@every_way
def test_zero_grad_inside(engine, form, curvature):
    model, (x, y) = mlp(), rows()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters())

    def closure():
        optimizer.zero_grad(set_to_none=False)
        return F.cross_entropy(model(x), y)

    run(penalty_of(model, engine, curvature), closure, form)
    other = mlp()
    run(penalty_of(other, engine, curvature), lambda: F.cross_entropy(other(x), y), form)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.supports("an optimiser's step inside the closure", cell="refused")
@every_way
@pytest.mark.parametrize("warmup", [0, 1])
def test_optimizer_step_inside(engine, form, curvature, warmup):
    model, (x, y) = mlp(), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    def closure():
        loss = F.cross_entropy(model(x), y)
        optimizer.step()
        return loss

    penalty = penalty_of(model, engine, curvature, warmup=warmup)
    plain = warmup > 0  # there the closure runs on the model itself
    refused(
        model, penalty, closure, form, RuntimeError, r"SGD\.step\(\).*step after", buffers=not plain
    )
    optimizer.step()  # outside it steps


@pytest.mark.supports("a penalty inside another's closure", cell="refused")
@every_way
def test_nested_penalties(engine, form, curvature):
    model, other, (x, y) = mlp(), mlp(seed=4), rows()
    for inner_model in (model, other):
        for inner_engine in ("autograd", "difference"):
            inner = penalty_of(inner_model, inner_engine, "hessian")

            def closure(inner=inner, inner_model=inner_model):
                loss = inner(lambda: F.cross_entropy(inner_model(x), y))
                return loss + F.cross_entropy(model(x), y)

            for warmup in (0, 1):
                penalty = penalty_of(model, engine, curvature, warmup=warmup)
                refused(model, penalty, closure, form, RuntimeError, "cannot be nested.*add the")
                assert inner.step == 0


def test_penalties_side_by_side():
    model, (x, y) = mlp(norm=False), rows()
    closure = lambda: F.cross_entropy(model(x), y)
    one = penalty_of(model, "difference", "hessian", seed=1)
    two = penalty_of(model, "difference", "ggn", seed=2)
    (one(closure) + two(closure)).backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for each in (one, two):
        each.load_state_dict({**each.state_dict(), "calls": 0})
    one(closure).backward()
    two(closure).backward()
    for a, p in zip(together, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


@every_way
def test_closures_that_return_no_loss(engine, form, curvature):
    model, (x, y) = mlp(), rows()

    def generator():
        yield F.cross_entropy(model(x), y)

    async def coroutine():
        return F.cross_entropy(model(x), y)

    penalty = penalty_of(model, engine, curvature)
    for closure in (generator, coroutine):
        refused(model, penalty, closure, form, TypeError, "must return the loss: write return")


@every_difference
def test_a_batch_drawn_inside_that_runs_out(form, curvature):
    model, batches = mlp(), iter([rows()])
    penalty = penalty_of(model, "difference", curvature)

    def closure():
        x, y = next(batches)
        return F.cross_entropy(model(x), y)

    refused(
        model, penalty, closure, form, seht.UnrepeatableError, "has run out.*draw the batch",
        random=False,
    )  # fmt: skip
    with pytest.raises(StopIteration):  # the first run's own exception is the user's
        run(penalty, closure, form)


@pytest.mark.supports("weights frozen inside the closure")
@every_way
def test_a_closure_that_freezes_a_weight(engine, form, curvature):
    model, (x, y) = mlp(), rows()

    def closure():
        model[0].weight.requires_grad_(False)
        return F.cross_entropy(model(x), y)

    penalty = penalty_of(model, engine, curvature)
    run(penalty, closure, form)
    assert penalty.last.unused == ("0.weight",) and model[0].weight.grad is None
    other = mlp()
    other[0].weight.requires_grad_(False)
    named = penalty_of(other, engine, curvature)
    run(named, lambda: F.cross_entropy(other(x), y), form)
    assert named.last.layers == ("4.weight",) and model[4].weight.grad is not None


@every_way
def test_a_closure_that_deletes_a_module(engine, form, curvature):
    model, (x, y) = mlp(), rows()

    def closure():
        if len(model) == 5:
            del model[1]  # the norm, with its buffers
        return F.cross_entropy(model(x), y)

    penalty = penalty_of(model, engine, curvature)
    run(penalty, closure, form)
    other = nn.Sequential(*[m for m in mlp() if not isinstance(m, nn.BatchNorm1d)])
    second = penalty_of(other, engine, curvature)
    run(second, lambda: F.cross_entropy(other(x), y), form)
    assert penalty.last.trace == pytest.approx(second.last.trace, rel=1e-9)


@every_difference
def test_a_closure_that_rewrites_its_weights(form, curvature):
    """Clipping before use is done once, wherever the weights are moved to."""
    x, y = rows()

    def make(model):
        def closure():
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
            model[4].weight.data.mul_(0.99)
            return F.cross_entropy(model(x), y)

        return closure

    models = []

    def build():
        models.append(mlp())
        return models[-1]

    assert_right(build, make, form, curvature, rtol=1e-4)
    for name, p in models[0].named_parameters():
        assert torch.equal(p, models[1].get_parameter(name)), name
    assert models[0][0].weight.abs().max() <= 0.1


@every_difference
def test_a_closure_that_replaces_a_module_is_unrepeatable(form, curvature):
    model, (x, y) = mlp(), rows()

    def closure():
        model[4] = nn.Linear(6, 3).double()
        return F.cross_entropy(model(x), y)

    penalty = penalty_of(model, "difference", curvature, warm=False)
    with pytest.raises((seht.UnrepeatableError, ValueError), match=r"repeated|depend"):
        run(penalty, closure, form)


@every_way
def test_copies_made_inside_the_closure_are_ordinary_models(engine, form, curvature):
    model, (x, y) = mlp(), rows()
    kept = []

    def closure():
        loss = F.cross_entropy(model(x), y)
        if not seht.replaying():
            kept.append(copy.deepcopy(model))
        return loss

    before = copy.deepcopy(model)
    run(penalty_of(model, engine, curvature), closure, form)
    for name, p in kept[0].named_parameters():
        assert torch.equal(p, before.get_parameter(name))
    z = kept[0](x)
    assert type(z) is torch.Tensor and torch.equal(z, before(x))


@pytest.mark.supports("a model that is called twice", engine="{form}")
@every_difference
def test_the_model_called_twice(form, curvature):
    x, y = rows()
    make = lambda model: lambda: F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)
    assert_right(mlp, make, form, curvature)
