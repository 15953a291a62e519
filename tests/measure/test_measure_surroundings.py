"""Landscape, sharpness, bound and tracker."""

import math

import pytest
import torch
import torch.nn.functional as F
from curved_problems import data, exact_hessian, loss_fn, network
from torch import nn

from seht import measure
from seht.measure.landscape import filter_normalised
from seht.probes import choose

# --- landscape --------------------------------------------------------------------------------


def test_directions_have_the_filters_norms():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 4))
    weights = choose(model, "*").tensors
    way = filter_normalised(weights, 0, 0)
    for name in ("0.weight", "2.weight"):
        weight = dict(model.named_parameters())[name]
        torch.testing.assert_close(way[name].flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
    assert not way["0.bias"].any()
    assert not torch.equal(way["0.weight"], filter_normalised(weights, 0, 1)["0.weight"])


def test_slices_are_losses():
    model, batch = network(), data()
    found = measure.landscape(model, loss_fn, batch, points=5, span=0.5, directions=2)
    assert found.steps == (-0.5, -0.25, 0.0, 0.25, 0.5)
    centre = loss_fn(model, batch).item()
    assert found.centre == pytest.approx(centre) and found.mean[2] == pytest.approx(centre)
    assert found.stderr[2] == pytest.approx(0, abs=1e-12) and found.stderr[0] > 0
    way = filter_normalised(choose(model).tensors, 0, 1)
    with torch.no_grad():
        for name, d in way.items():
            model.get_parameter(name).add_(0.25 * d)
    assert found.losses[1][3] == pytest.approx(loss_fn(model, batch).item())


def test_the_middle_of_an_odd_grid_is_the_model_itself():
    found = measure.landscape(network(), loss_fn, data(), points=21, directions=1)
    assert found.steps[10] == 0 and found.losses[0][10] == found.centre
    assert found.steps == tuple(-step for step in reversed(found.steps))


def test_a_plane_holds_its_two_slices():
    model, batch = network(), data()
    line = measure.landscape(model, loss_fn, batch, points=5, directions=2)
    plane = measure.landscape(model, loss_fn, batch, points=5, dims=2)
    assert plane.losses[2] == pytest.approx(line.losses[0])
    assert [row[2] for row in plane.losses] == pytest.approx(line.losses[1])


def test_a_loss_that_overflows_is_no_error():
    model = network(dtype=torch.float32)
    found = measure.landscape(model, lambda m, b: loss_fn(m, b).exp().exp(), data(
        dtype=torch.float32), span=1e4, points=3)  # fmt: skip
    assert math.isinf(found.losses[0][0]) and found.as_dict()["losses"][0][0] is None


# --- sharpness --------------------------------------------------------------------------------


def test_the_random_rise_is_the_trace():
    model, batch = network(nn.Tanh), data()
    hessian = exact_hessian(model, batch)
    found = measure.sharpness(model, loss_fn, batch, rho=1e-3, draws=200, steps=1)
    expected = found.rho**2 * float(hessian.trace()) / (2 * len(hessian))
    assert abs(found.random - expected) < 4 * found.random_stderr
    assert found.random_stderr < 0.2 * expected


def test_the_adversarial_rise_in_a_bowl():
    """At its minimum the worst direction of a quadratic is the first eigenvector."""
    h = torch.tensor([9.0, 4.0, 1.0]).double()

    class Bowl(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([[1e-9, 1e-9, 1e-9]]).double())

        def forward(self, x):
            return 1 + (h * self.w**2).sum() / 2 + 0 * x.sum()

    found = measure.sharpness(Bowl(), lambda m, x: m(x), torch.zeros(2, 1), rho=0.1, steps=60)
    assert found.adversarial == pytest.approx(9 * 0.01 / 2, rel=1e-3)
    assert found.random <= found.random_worst <= found.adversarial
    assert found.first_step <= found.adversarial and abs(found.gain) < 1e-4


def test_sams_step_is_the_first():
    model, batch = network(nn.Tanh), data()
    found = measure.sharpness(model, loss_fn, batch, rho=0.05, draws=1, steps=3)
    weights = [p for p in model.parameters() if p.dim() >= 2]
    loss = loss_fn(model, batch)
    g = torch.autograd.grad(loss, weights)
    size = torch.cat([p.flatten() for p in g]).norm()
    with torch.no_grad():
        for w, d in zip(weights, g, strict=True):
            w.add_(0.05 * d / size)
    assert found.first_step == pytest.approx(loss_fn(model, batch).item() - loss.item())
    assert math.isnan(found.random_stderr)


# --- bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [None, 20])
def test_logit_derivatives(micro_batch):
    model, (x, y) = network(), data()
    found = measure.bound(model, loss_fn, (x, y), micro_batch=micro_batch)
    p = model(x).softmax(1)
    assert found.jacobian == pytest.approx((p - F.one_hot(y, 3)).norm(dim=1).mean().item())
    assert found.hessian == pytest.approx((1 - p.square().sum(1)).mean().item())
    assert not found.linear and found.terms is None and "no bound" in found.note


def test_the_terms_of_a_linear_model():
    (x, y), torch_model = data(), nn.Sequential(nn.Flatten(), nn.Linear(5, 3)).double()
    found = measure.bound(torch_model, loss_fn, (x, y), cap=2.0, delta=0.1)
    w = torch.cat([torch_model[1].weight, torch_model[1].bias[:, None]], 1).detach()
    a = w.norm(dim=1).sum().item()
    theta = math.log(48 * 3) ** 3 * (x.square().sum(1) + 1).max().item()
    mu, nu, n, b = found.jacobian, found.hessian, 48, 2.0
    assert found.linear
    assert found.terms["jacobian"] == pytest.approx(
        (a * mu) ** (2 / 3) * (theta * b) ** (1 / 3) / n ** (1 / 3)
    )
    assert found.terms["hessian"] == pytest.approx(a * math.sqrt(b * nu * theta / n))
    log = math.log(b * a * a * theta / (nu * n))
    assert found.terms["quadratic"] == pytest.approx(b * a * a * theta / (n * (log**2 + 1)))
    zeta = b * (math.log(10) + math.log(math.log(n))) / n
    assert found.terms["confidence"] == pytest.approx(zeta)
    assert found.total == pytest.approx(sum(found.terms.values()))


def test_many_classes_are_probed():
    torch.manual_seed(0)
    model = nn.Linear(4, 400).double()
    x, y = torch.randn(30, 4).double(), torch.arange(30)
    found = measure.bound(model, loss_fn, (x, y))
    exact = (1 - model(x).softmax(1).square().sum(1)).mean().item()
    assert found.hessian_stderr > 0 and abs(found.hessian - exact) < 4 * found.hessian_stderr


# --- tracker ----------------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))


def test_every_n_steps():
    model, batch, writer, seen = network(), data(), Writer(), []
    tracker = measure.Tracker(model, loss_fn, batch, every=3, log=writer, per_layer=True)
    other = measure.Tracker(model, loss_fn, batch, every=3, log=lambda *row: seen.append(row))
    for _ in range(7):
        tracker.step()
        other.step()
    assert [entry.step for entry in tracker.history] == [0, 3, 6]
    names = {name for name, _, _ in writer.rows}
    assert {"seht/trace", "seht/trace_stderr", "seht/weight_norm", "seht/loss"} <= names
    assert "seht/trace/0.weight" in names
    assert [step for step, _ in seen] == [0, 3, 6]
    first = measure.trace(model.eval(), loss_fn, batch)
    assert seen[0][1]["seht/trace"] == first.estimate


def test_training_is_the_same_with_a_tracker():
    def train(track):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        x, y = data(dtype=torch.float32)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker = measure.Tracker(model, loss_fn, (x, y), every=2) if track else None
        for _ in range(6):
            sgd.zero_grad()
            loss_fn(model, (x, y)).backward()
            sgd.step()
            if tracker:
                tracker.step()
        return model.state_dict()

    plain, tracked = train(False), train(True)
    assert all(torch.equal(plain[name], tracked[name]) for name in plain)


@pytest.mark.parametrize("budget", [0.02, 0.2])
def test_the_budget_is_kept(budget):
    """Time is counted: a step takes 1, and every run of the loss inside a measurement 0.1."""
    now = 0.0

    def loss(model, batch):
        nonlocal now
        now += 0.1
        return loss_fn(model, batch)

    tracker = measure.Tracker(network(), loss, data(), budget=budget, clock=lambda: now)
    for _ in range(400):
        now += 1
        tracker.step()
        if len(tracker.history) > 1:
            assert tracker.share <= budget
    cost = tracker.share * now / len(tracker.history)
    assert 0.1 < cost < 3
    assert len(tracker.history) >= 0.8 * budget * 400 / cost  # and it is used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of every= .* and budget="),
        ({"every": 2, "budget": 0.1}, "one of every= .* and budget="),
        ({"every": 0}, "every must be at least 1"),
        ({"budget": 2}, "a share of the time"),
        ({"every": 1, "log": 3}, "log must have add_scalar"),
        ({"every": 1, "mode": "train"}, "mode must be"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        measure.Tracker(network(), loss_fn, data(), **options)


def test_an_iterator_is_refused():
    with pytest.raises(TypeError, match="only once"):
        measure.Tracker(network(), loss_fn, iter([data()]), every=1)
