"""The Gauss-Newton trace: against a dense J^T H_out J, and where the network ends."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import every_engine
from reference import SEED, Along, gradient, relative, signs
from torch import Tensor, nn

import seht
from seht import probes

X = torch.linspace(-2, 2, 15).double().view(5, 3).sin()
Y = torch.tensor([0, 1, 2, 1, 0])
T = torch.linspace(0, 3, 15).double().view(5, 3).cos()

LOSSES = {
    "cross_entropy": lambda z: F.cross_entropy(z, Y),
    "smoothed": lambda z: F.cross_entropy(z, Y, label_smoothing=0.2),
    "mse": lambda z: F.mse_loss(z, T),
    "bce": lambda z: F.binary_cross_entropy_with_logits(z, T.sigmoid()),
    "huber": lambda z: F.huber_loss(z, T, delta=0.8),
    "quartic": lambda z: (z**4).mean(),
    # A confidence penalty: not convex in the outputs.
    "entropy": lambda z: F.cross_entropy(z, Y) + 3 * (z.softmax(1) * z.log_softmax(1)).mean(),
}


def network(activation=nn.Tanh):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 2), activation(), nn.Linear(2, 3)).double()


def dense(model, loss, s=None):
    """tr(G), or s^T G s, from the explicit Jacobian and the explicit Hessian of the loss."""
    weights = dict(probes.choose(model).tensors)
    values = tuple(weights.values())

    def outputs(*values):
        return torch.func.functional_call(model, dict(zip(weights, values, strict=True)), (X,))

    jacobian = torch.autograd.functional.jacobian(outputs, values, create_graph=True)
    z = outputs(*values)
    curvature = torch.autograd.functional.hessian(loss, z, create_graph=True)
    h = curvature.view(z.numel(), z.numel())
    j = torch.cat([part.reshape(z.numel(), -1) for part in jacobian], 1)
    if s is None:
        return torch.trace(j.t() @ h @ j)
    along = j @ torch.cat([part.flatten() for part in s])
    return along @ h @ along


def estimate(model, closure, engine, s=None, **options):
    if engine == "difference":  # of second order: nothing but rounding is left
        options = {"two_sided": True, "kappa": 1e-4, **options}
    if s is not None:
        options["estimator"] = Along(s)
    return seht.hessian_trace(model, closure, engine=engine, curvature="ggn", seed=SEED, **options)


@every_engine
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Softsign], ids=lambda a: a.__name__)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.supports('`curvature="ggn"`')
def test_dense(engine, loss, activation):
    model = network(activation)
    generator = torch.Generator().manual_seed(1)
    s = [signs(w, generator) for w in probes.choose(model).tensors.values()]
    truth = dense(model, loss, s)
    ours = estimate(model, lambda: loss(model(X)), engine, s)
    assert ours.item() == pytest.approx(truth.item(), rel=1e-6)
    leaves = list(model.parameters())
    assert relative(gradient(ours, leaves), gradient(truth, leaves)) < 1e-6


@every_engine
def test_the_trace_is_the_sum_over_unit_directions(engine):
    model, loss = network(), LOSSES["cross_entropy"]
    weights = list(probes.choose(model).tensors.values())
    total = 0.0
    for i, w in enumerate(weights):
        for k in range(w.numel()):
            s = [torch.zeros_like(w) for w in weights]
            s[i].view(-1)[k] = 1.0
            total += estimate(model, lambda: loss(model(X)), engine, s).item()
    assert total == pytest.approx(dense(model, loss).item(), rel=1e-6)


@every_engine
def test_cross_entropy_gives_the_trace_of_the_fisher_information(engine):
    """The mean squared gradient of log p over labels drawn from the model's own predictions."""
    model = network()
    weights = list(probes.choose(model).tensors.values())
    fisher = 0.0
    for x in X:
        log_p = model(x).log_softmax(0)
        for log in log_p:
            g = torch.autograd.grad(log, weights, retain_graph=True)
            fisher += log.exp().item() * sum(part.square().sum().item() for part in g) / len(X)
    closure = lambda: F.cross_entropy(model(X), Y)
    draws = [
        seht.hessian_trace(model, closure, engine=engine, curvature="ggn", seed=i).item()
        for i in range(150)
    ]
    mean, deviation = torch.tensor(draws).mean().item(), torch.tensor(draws).std().item()
    assert abs(mean - fisher) < 4 * deviation / 150**0.5 < 0.3 * fisher


@every_engine
@pytest.mark.parametrize("name", LOSSES)
def test_never_negative_where_the_loss_is_convex(engine, name):
    values = []
    for seed in range(12):
        model = network(nn.ReLU)
        torch.manual_seed(seed)
        for w in model.parameters():
            nn.init.normal_(w)
        values.append(estimate(model, lambda: LOSSES[name](model(X)), engine).item())
    assert (min(values) < 0) == (name == "entropy")


class Masked(nn.Module):
    """Rules classes out, as for actions that are not allowed or a vocabulary that was padded."""

    def __init__(self, fill, *, last=nn.Identity):
        super().__init__()
        self.body, self.fill, self.last = network(), fill, last()

    def forward(self, x):
        return self.last(self.body(x).masked_fill(torch.tensor([False, True, False]), self.fill))


@every_engine
@pytest.mark.parametrize("last", [nn.Identity, lambda: nn.LogSoftmax(-1)], ids=["z", "log_p"])
def test_a_class_that_is_ruled_out(engine, last):
    """A logit of minus infinity has no part in the trace: the same as with a very small one."""
    found = []
    for fill in (-torch.inf, -1e4):
        model = Masked(fill, last=last)
        closure = lambda model=model: F.cross_entropy(model(X), Y // 2 * 2)
        trace = estimate(model, closure, engine)
        value = seht.measure.trace(
            model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            (X, Y // 2 * 2), curvature="ggn", seed=0,
        ).estimate  # fmt: skip
        found.append((trace.item(), value, gradient(trace, list(model.parameters()))))
    (trace, value, g), (wanted, measured, h) = found
    assert trace == pytest.approx(wanted, rel=1e-6) and value == pytest.approx(measured, rel=1e-6)
    assert trace > 0 and relative(g, h) < 1e-6


# --- where the network ends -------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    name: str = "output"


class Named(NamedTuple):
    logits: Tensor
    other: int = 3


class Wrapped(nn.Module):
    """The network with its outputs in some structure."""

    def __init__(self, wrap):
        super().__init__()
        self.body, self.wrap = network(), wrap

    def forward(self, x):
        return self.wrap(self.body(x))


STRUCTURES = {
    "tensor": (lambda z: z, lambda out: out),
    "tuple": (lambda z: (z, None), lambda out: out[0]),
    "list": (lambda z: [1, z], lambda out: out[1]),
    "dict": (lambda z: {"logits": z, "n": 1}, lambda out: out["logits"]),
    "nested": (lambda z: {"all": [(z,)]}, lambda out: out["all"][0][0]),
    "dataclass": (Output, lambda out: out.logits),
    "namedtuple": (Named, lambda out: out.logits),
    # Parts are curved together, as one output is.
    "parts": (lambda z: (z[:, :1], z[:, 1:]), lambda out: torch.cat(out, 1)),
}


def plain_answer(engine):
    model = network()
    trace = estimate(model, lambda: F.cross_entropy(model(X), Y), engine)
    return trace.item(), gradient(trace, list(model.parameters()))


def assert_plain(model, closure, engine, **options):
    """The same as for the bare network."""
    value, g = plain_answer(engine)
    trace = estimate(model, closure, engine, **options)
    assert trace.item() == pytest.approx(value, rel=1e-6)
    assert relative(gradient(trace, list(model.parameters())), g) < 1e-6


@every_engine
@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_in_any_structure(engine, name):
    wrap, unwrap = STRUCTURES[name]
    model = Wrapped(wrap)
    assert_plain(model, lambda: F.cross_entropy(unwrap(model(X)), Y), engine)


@every_engine
def test_several_calls_of_the_model(engine):
    model = network()
    halves = lambda: torch.cat([model(X[:2]), model(X[2:])])
    assert_plain(model, lambda: F.cross_entropy(halves(), Y), engine)


class WithLoss(nn.Module):
    """Returns its own loss, as Hugging Face models do; ``mark`` marks the logits in between."""

    def __init__(self, mark=lambda z: z):
        super().__init__()
        self.body, self.mark = network(), mark

    def forward(self, x, y):
        return F.cross_entropy(self.mark(self.body(x)), y)


@every_engine
def test_a_model_that_returns_its_loss_is_refused_and_told_the_ways_out(engine):
    model = WithLoss()
    with pytest.raises(RuntimeError, match=r'boundary="module\.name".*seht\.boundary\(logits\)'):
        estimate(model, lambda: model(X, Y), engine)
    assert_plain(model, lambda: model(X, Y), engine, boundary="body")
    marked = WithLoss(seht.boundary)
    assert_plain(marked, lambda: marked(X, Y), engine)


@every_engine
def test_errors(engine):
    model = network()
    with pytest.raises(RuntimeError, match="linear in the model's outputs"):
        estimate(model, lambda: model(X).mean(), engine)
    with pytest.raises(RuntimeError, match=r"never called.*the module that.*seht\.boundary"):
        estimate(model, lambda: F.cross_entropy(model[2](model[0](X)), Y), engine)
    with pytest.raises(ValueError, match=r"no module 'head'.*named_modules"):
        estimate(model, lambda: F.cross_entropy(model(X), Y), engine, boundary="head")
    with pytest.raises(ValueError, match="curvature"):
        seht.hessian_trace(model, lambda: F.cross_entropy(model(X), Y), curvature="gnn")


def test_outside_a_step_a_mark_is_its_argument():
    z = torch.ones(2, requires_grad=True)
    assert seht.boundary(z) is z


@every_engine
def test_terms_that_pass_by_the_outputs_add_nothing(engine):
    model = network()
    decay = lambda: sum(w.square().sum() for w in model.parameters())
    assert_plain(model, lambda: F.cross_entropy(model(X), Y) + decay(), engine)


@every_engine
def test_a_module_behind_the_outputs_has_its_share_of_the_gradient(engine):
    """The curvature in the outputs depends on it: compared with differences of the estimate."""
    model, head = network(), nn.Linear(3, 3).double()
    trace = lambda: estimate(model, lambda: F.cross_entropy(head(model(X)), Y), engine)
    (g,) = gradient(trace(), [head.weight])
    direction = torch.randn_like(g)
    ends = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            head.weight.add_(direction, alpha=step)
            ends.append(trace().item())
            head.weight.sub_(direction, alpha=step)
    assert (ends[0] - ends[1]) / 2e-4 == pytest.approx((g * direction).sum().item(), rel=1e-5)


@pytest.mark.parametrize("lean", [False, True], ids=["scalar", "lean"])
@pytest.mark.parametrize("two_sided", [False, True], ids=["one-sided", "two-sided"])
def test_the_number_of_passes(lean, two_sided):
    """Two plain steps, SAM's price; the lean form pays one more forward pass."""
    model, count = network(), 0

    def closure():
        nonlocal count
        count += 1
        return F.cross_entropy(model(X), Y)

    penalty = seht.HessianTrace(
        model, weight=0.1, engine="difference", curvature="ggn", two_sided=two_sided
    )
    step = penalty.backward if lean else penalty
    for _ in range(3):
        step(closure)
    count = 0
    step(closure)  # by now without a check of the step
    assert count == (4 if two_sided else 2) + lean
