"""share=: the weight for which the penalty's averaged gradient is a share of the loss's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht

MEASURED = 8


def task(seed=0, norm=False):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(7)] if norm else []
    model = nn.Sequential(nn.Linear(5, 7), *middle, nn.Tanh(), nn.Linear(7, 3)).double()
    x, y = torch.randn(40, 5).double(), torch.randint(0, 3, (40,))
    return model, [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]


def gradient(value, model):
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return torch.cat([torch.zeros(0)] + [g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("engine", ["difference", "autograd"])
def test_it_is_the_share_of_averaged_gradients(curvature, form, engine):
    """Against both gradients taken apart, at weights that stand still."""
    model, batches = task()
    penalty = seht.HessianTrace(model, share=0.5, curvature=curvature, engine=engine, every=2)
    losses, traces = [], []
    for step in range(2 * MEASURED):
        x, y = batches[step % 4]
        closure = lambda: F.cross_entropy(model(x), y)
        if form == "scalar":
            penalty(closure)
        else:
            penalty.backward(closure)
        if penalty.last.trace is None:
            continue
        assert penalty.last.weight == 0  # nothing is charged before the share is known
        loss, trace = seht.loss_and_trace(
            model, closure, curvature=curvature, engine=engine, seed=penalty.last.seed
        )
        losses.append(gradient(loss, model))
        loss, trace = seht.loss_and_trace(
            model, closure, curvature=curvature, engine=engine, seed=penalty.last.seed
        )
        traces.append(gradient(trace, model))
    assert len(losses) == MEASURED
    size = torch.stack(losses).mean(0).norm()
    other = torch.stack(traces).mean(0).norm()
    penalty(closure)
    assert penalty.last.weight == pytest.approx(2 * 0.5 * float(size / other), rel=1e-3)


def test_it_is_held_and_with_follow_it_is_not():
    weights = {}
    for follow in (False, True):
        model, batches = task(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        penalty = seht.HessianTrace(model, share=0.1, follow=follow, curvature="ggn")
        seen = []
        for step in range(30):
            x, y = batches[step % 4]
            optimizer.zero_grad()
            penalty(lambda: F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            seen.append(penalty.last.weight)
        weights[follow] = seen[MEASURED:]
    assert len(set(weights[False])) == 1 and weights[False][0] > 0
    assert len(set(weights[True])) == len(weights[True])


def test_the_gradient_of_a_step_is_that_of_loss_and_penalty():
    """A look leaves the step itself as it was: against a fixed weight of the same size."""
    model, batches = task(2, norm=True)
    x, y = batches[0]
    other = copy.deepcopy(model)
    penalty = seht.HessianTrace(model, share=0.3, follow=True, curvature="ggn", seed=3)
    for _ in range(MEASURED + 1):
        penalty(lambda: F.cross_entropy(model(x), y))
    model.zero_grad()
    penalty(lambda: F.cross_entropy(model(x), y)).backward()
    last = penalty.last
    other.load_state_dict(model.state_dict())
    loss, trace = seht.loss_and_trace(
        other, lambda: F.cross_entropy(other(x), y), curvature="ggn", seed=last.seed
    )
    factor = last.penalty / last.trace
    (loss + factor * trace).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-9)


def test_a_resumed_run_goes_on_to_the_last_bit():
    """Saved while the share is still measured."""
    runs = []
    for stop in (None, 5):
        model, batches = task(3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        penalty = seht.HessianTrace(model, share=0.2, curvature="ggn", seed=1)
        for step in range(14):
            if step == stop:
                state = penalty.state_dict()
                penalty = seht.HessianTrace(model, share=0.2, curvature="ggn", seed=9)
                penalty.load_state_dict(state)
            x, y = batches[step % 4]
            optimizer.zero_grad()
            penalty(lambda: F.cross_entropy(model(x), y)).backward()
            optimizer.step()
        runs.append((penalty.last.weight, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0] > 0
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_nothing_said_is_what_the_study_found_best():
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    closure = lambda: F.cross_entropy(model(x), y)
    bare, said = (
        seht.HessianTrace(model, seed=3, **options)
        for options in ({}, {"share": 2.0, "curvature": "ggn"})
    )
    for _ in range(MEASURED + 2):
        assert torch.equal(bare(closure), said(closure))
    assert bare.last.weight == said.last.weight > 0
    held_out = ([(x, y)], lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    tuned = seht.HessianTrace(model, held_out=held_out)
    assert tuned.curvature == "ggn" and "weight='tuned'" in repr(tuned)


@pytest.mark.parametrize(
    "options, curvature",
    [
        ({"weight": 1e-3}, "hessian"),  # the paper's
        ({"weight": lambda step: 1e-3}, "hessian"),
        ({"share": 2}, "ggn"),  # all that is known of shares was found with it
        ({"weight": "tuned"}, "ggn"),
        ({"weight": seht.Tuning(start=1.0)}, "ggn"),
        ({"weight": seht.WeightPath((0.1,), (1e-3,)), "total_steps": 10}, "hessian"),
        ({"weight": seht.WeightPath((0.1,), (1e-3,), "ggn"), "total_steps": 10}, "ggn"),
    ],
)
def test_the_curvature_where_none_is_said(options, curvature):
    model = nn.Linear(3, 2)
    assert seht.HessianTrace(model, **options).curvature == curvature
    for said in ("hessian", "ggn"):
        assert seht.HessianTrace(model, curvature=said, **options).curvature == said
