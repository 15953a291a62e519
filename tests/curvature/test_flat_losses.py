"""The Gauss-Newton trace of losses that have no curvature in the outputs, or no second derivative:
refused at the first step, in words, by both engines and in every form.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot, every_engine
from reference import relative
from stepping import FORMS, rows
from torch import nn

import seht
from seht import measure
from seht.engines import ENGINES

X, Y = rows()
T = torch.linspace(0, 3, 24).double().view(8, 3).cos()
S = T.sign()
RIGHT = torch.tensor([[0, -1, 0], [2, 1, -1]]).repeat(4, 1)


def network(*tail, activation=nn.Tanh):
    torch.manual_seed(3)
    body = (nn.Linear(4, 5), activation(), nn.Linear(5, 3))
    return nn.Sequential(*body, *tail).double()


FLAT = {
    "l1": lambda z: F.l1_loss(z, T),
    "abs": lambda z: (z - T).abs().mean(),
    "norm 1": lambda z: torch.linalg.vector_norm(z - T, 1, dim=1).mean(),
    "norm inf": lambda z: torch.linalg.vector_norm(z - T, torch.inf, dim=1).mean(),
    "hinge by relu": lambda z: F.relu(1 - S * z).mean(),
    "hinge by clamp": lambda z: (1 - S * z).clamp(min=0).mean(),
    "leaky": lambda z: F.leaky_relu(1 - S * z).mean(),
    "relu6": lambda z: F.relu6(z).mean(),
    "hardtanh": lambda z: F.hardtanh(2 * z).mean(),
    "shrunk": lambda z: (F.hardshrink(z) + F.softshrink(z)).mean(),
    "multi_margin": lambda z: F.multi_margin_loss(z, Y),
    "multilabel_margin": lambda z: F.multilabel_margin_loss(z, RIGHT),
    "distances of p 1": lambda z: torch.cdist(z, T, p=1.0).mean() + torch.pdist(z, 1.0).mean(),
    "distances of p inf": lambda z: torch.cdist(z, T, torch.inf).mean(),
    "hinge_embedding": lambda z: F.hinge_embedding_loss(z, S),
    "margin_ranking": lambda z: F.margin_ranking_loss(z[:, 0], z[:, 1], S[:, 0], margin=1.0),
    "triplet of p 1": lambda z: F.triplet_margin_loss(z[:2], z[2:4], z[4:6], p=1),
    "quantile": lambda z: torch.maximum(0.3 * (z - T), 0.7 * (T - z)).mean(),
    "a critic's mean": lambda z: z[:4].mean() - z[4:].mean(),
    "largest": lambda z: z.amax(1).mean(),
    "pool": lambda z: F.max_pool1d(z[None], 2).mean(),
    "power 1": lambda z: (z - T).pow(1).mean(),
    "rounded": lambda z: (z * z.round() + z * z.sign()).mean(),
    "nll": lambda z: F.nll_loss(z, Y),
    "nll of pixels": lambda z: F.nll_loss(z.view(2, 3, 2, 2), Y.view(2, 2, 2) * 0),
    "kl": lambda z: F.kl_div(z, T.softmax(1), reduction="batchmean"),
}
WAYS = r'curvature="hessian".*boundary="module\.name".*seht\.boundary\(logits\)'


@every_engine
@pytest.mark.parametrize("name", FLAT)
def test_no_curvature_in_the_outputs(engine, name):
    model = network()
    closure = lambda: FLAT[name](model(X))
    with pytest.raises(RuntimeError, match=WAYS):
        seht.hessian_trace(model, closure, engine=engine, curvature="ggn")


@every_engine
@pytest.mark.parametrize("name", FLAT)
def test_the_same_under_a_curve_is_not_refused(engine, name):
    """The trace is 2 (s . dF)^2 then, with F the piece that the outputs are on."""
    model = network()
    loss = lambda z: (1 + FLAT[name](z)).square()
    with warnings.catch_warnings():
        warnings.simplefilter("error", seht.PenaltyWarning)
        trace = seht.hessian_trace(
            model, lambda: loss(model(X)), engine=engine, curvature="ggn", seed=1
        )
    weights = [model[0].weight, model[2].weight]
    probe = next(
        seht.course.make_task(
            model, lambda: None, seht.probes.choose(model), seht.SehtH(), 1
        ).probes()
    ).values()
    slopes = torch.autograd.grad(FLAT[name](model(X)), weights)
    along = sum((s * g).sum() for s, g in zip(probe, slopes, strict=True))
    assert trace.item() == pytest.approx(2 * along.item() ** 2, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("name", FLAT)
def test_the_hessian_is_a_way_out(name):
    """Of both engines, and they agree."""
    model = network()
    leaves = list(model.parameters())
    closure = lambda: FLAT[name](model(X))
    traces = [seht.hessian_trace(model, closure, engine=e, seed=1) for e in sorted(ENGINES)]
    exact, ours = (
        [t.detach(), *torch.autograd.grad(t, leaves, materialize_grads=True)] for t in traces
    )
    assert relative(ours, exact) < 1e-5


PENALTIES = {
    "autograd": {"engine": "autograd"},
    "difference": {"engine": "difference"},
    "seht-d": {"estimator": seht.SehtD(prob=0.5, layer_prob=0.9)},
    "seht-s": {"estimator": "seht-s"},
    "two-sided": {"engine": "difference", "two_sided": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PENALTIES)
def test_refused_at_the_first_penalised_step_which_leaves_nothing_behind(name, form):
    model = network()
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", warmup=1, **PENALTIES[name])
    step = penalty.backward if form == "lean" else penalty
    step(lambda: FLAT["l1"](model(X)))
    model.zero_grad()
    before = Snapshot(model)
    with pytest.raises(RuntimeError, match=WAYS):
        step(lambda: FLAT["l1"](model(X)))
    before.assert_same(Snapshot(model))
    assert penalty.step == 1


def l1(model, batch):
    return F.l1_loss(model(batch[0]), batch[1])


DATA = [(X, T)]
MEASURED = {
    "trace": lambda m: measure.trace(m, l1, DATA, curvature="ggn"),
    "by layer": lambda m: measure.trace(m, l1, DATA, curvature="ggn", per_layer=True),
    "eigenvalues": lambda m: measure.eigenvalues(m, l1, DATA, curvature="ggn"),
    "density": lambda m: measure.density(m, l1, DATA, curvature="ggn"),
    "bound": lambda m: measure.bound(m, l1, DATA),
}


@pytest.mark.parametrize("name", MEASURED)
def test_measuring_refuses_it(name):
    with pytest.raises(RuntimeError, match=WAYS):
        MEASURED[name](network())


def test_the_trace_of_the_hessian_may_be_nothing():
    """Of a ReLU network under an absolute error it is, exactly: measured by way of G, no noise."""
    found = measure.trace(network(activation=nn.ReLU), l1, DATA)
    assert found.estimate == 0 and found.stderr == 0


# --- zeros of this batch ------------------------------------------------------------------------

ZERO = {
    "far out on a Huber loss": lambda z: F.huber_loss(z, T + 100),
    "far out on a smooth L1": lambda z: F.smooth_l1_loss(z, T - 100),
    "no margin is active": lambda z: F.relu(-100 - S * z).square().mean(),
    "saturated": lambda z: F.binary_cross_entropy_with_logits(1e5 * z, (z > 0).double()),
}


@pytest.mark.parametrize("form", [*FORMS, "autograd"])
@pytest.mark.parametrize("name", ZERO)
def test_flat_on_this_batch_is_said_once(name, form):
    model = network()
    closure = lambda: ZERO[name](model(X))
    engine = "autograd" if form == "autograd" else "difference"
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", engine=engine)
    step = penalty.backward if form == "lean" else lambda c: penalty(c).backward()
    with pytest.warns(seht.PenaltyWarning, match='no curvature.*on this batch.*"hessian"'):
        step(closure)
    assert penalty.last.trace == 0
    ours = [p.grad for p in model.parameters()]
    plain = torch.autograd.grad(closure(), list(model.parameters()))
    torch.testing.assert_close(ours, list(plain), rtol=1e-12, atol=1e-14)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(closure)


@every_engine
def test_a_dead_network_under_a_curved_loss_is_no_news(engine):
    model = network(activation=nn.ReLU)
    with torch.no_grad():
        model[0].bias.fill_(-100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = seht.hessian_trace(
            model, lambda: F.mse_loss(model(X), T), engine=engine, curvature="ggn", params=["0.*"]
        )
    assert trace.item() == 0


class Counted(torch.autograd.Function):
    """A cube whose double backward counts."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return CountedBackward.apply(x, g)


class CountedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx, h):
        Counted.count += 1
        x, g = ctx.saved_tensors
        return 6 * x * g * h, 3 * x**2 * h


def test_only_the_first_step_looks():
    model, counts = network(), []
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", engine="autograd")
    for _ in range(3):
        Counted.count = 0
        penalty(lambda: Counted.apply(model(X)).mean())
        counts.append(Counted.count)
    assert counts[0] == counts[1] + 1 and counts[1] == counts[2]


# --- a loss without a second derivative ---------------------------------------------------------


def ctc(z):
    lengths = torch.tensor([8]), torch.tensor([2])
    return F.ctc_loss(z.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), *lengths)


ONCE = {
    "ctc": ctc,
    "cdist": lambda z: torch.cdist(z, T).mean(),
    "pdist": lambda z: torch.pdist(z).mean(),
}


@pytest.mark.parametrize("form", [*FORMS, "autograd"])
@pytest.mark.parametrize("name", ONCE)
def test_no_second_derivative(name, form):
    """The way out is named, and works."""
    model = network()
    engine = "autograd" if form == "autograd" else "difference"
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", engine=engine)
    step = penalty.backward if form == "lean" else penalty
    before = Snapshot(model)
    with pytest.raises(RuntimeError, match="""curvature="hessian" with engine='difference'"""):
        step(lambda: ONCE[name](model(X)))
    before.assert_same(Snapshot(model))


@pytest.mark.parametrize("form", FORMS)
def test_classes_in_the_second_dimension(form):
    """PyTorch's kernel fails in the third derivative; what is said to do instead works."""
    model = network()
    penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn")
    step = penalty.backward if form == "lean" else penalty
    rows = X.view(2, -1, X.shape[1])
    labels = torch.zeros(rows.shape[:2], dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"give it rows: F.cross_entropy\(logits.movedim"):
        step(lambda: F.cross_entropy(model(rows).transpose(1, 2), labels).exp())

    def perplexity():
        logits = model(rows).transpose(1, 2)
        return F.cross_entropy(logits.movedim(1, -1).flatten(0, -2), labels.flatten()).exp()

    step(perplexity)
    assert penalty.last.trace > 0


@pytest.mark.parametrize("name", ONCE)
def test_the_way_out(name):
    loss = lambda model, x: ONCE[name](model(x))
    report = seht.check(network(), loss, X, engines="difference", directions=1)
    assert report.ok, str(report)


def test_measuring_without_a_second_derivative():
    loss = lambda model, batch: torch.cdist(model(batch[0]), batch[1]).mean()
    for ask in (measure.trace, measure.eigenvalues):
        with pytest.raises(RuntimeError, match='take curvature="hessian"'):
            ask(network(), loss, DATA, curvature="ggn")


def test_an_operator_of_the_network_is_not_taken_for_one_of_the_loss():
    class Distances(nn.Module):
        def forward(self, x):
            return torch.cdist(x, T)

    model = network(Distances())
    closure = lambda: model(X).square().mean()
    with pytest.raises(RuntimeError, match=r"operator of the model.*use engine='difference'"):
        seht.hessian_trace(model, closure, engine="autograd", curvature="ggn")
    assert seht.hessian_trace(model, closure, engine="difference", curvature="ggn").item() > 0
