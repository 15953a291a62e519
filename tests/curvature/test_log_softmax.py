"""A model that ends in log_softmax: its Gauss-Newton trace is that of the logits."""

import pytest
import torch
import torch.nn.functional as F
from helpers import every_engine
from stepping import assert_gradients, gradients, penalise, rows
from torch import nn

import seht
from seht import measure

X, Y = rows()
SOFT = torch.linspace(0, 3, 24).double().view(8, 3).cos().softmax(1)


class Network(nn.Module):
    """Puts out what ``end`` makes of the logits."""

    def __init__(self, end=lambda z: z, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        self.end = end

    def forward(self, x):
        return self.end(self.body(x))


LOSSES = {
    "nll": lambda log_p: F.nll_loss(log_p, Y),
    "ignored": lambda log_p: F.nll_loss(log_p, Y, ignore_index=1),
    "weighted": lambda log_p: F.nll_loss(log_p, Y, weight=torch.tensor([1.0, 2, 3]).double()),
    "kl": lambda log_p: F.kl_div(log_p, SOFT, reduction="batchmean"),
    "by hand": lambda log_p: -(SOFT * log_p).sum(1).mean(),
    "less entropy": lambda log_p: F.nll_loss(log_p, Y) + 0.3 * (log_p.exp() * log_p).sum(1).mean(),
    "focal": lambda log_p: -(SOFT * (1 - log_p.exp()) ** 2 * log_p).sum(1).mean(),
}
OPTIONS = {
    "scalar": {},
    "lean": {},
    "autograd": {},
    "seht-d": {"estimator": seht.SehtD(prob=0.5, layer_prob=0.9)},
    "seht-s": {"estimator": "seht-s"},
    "two-sided": {"two_sided": True},
}


def step(end, loss, name, **options):
    """One penalised step: the record, and the gradients."""
    model = Network(end)
    form = name if name in ("lean", "autograd") else "scalar"
    penalty = penalise(model, lambda: loss(model(X)), form, curvature="ggn", **options)
    return penalty.last, gradients(model.parameters())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_it_does_not_matter_where_log_softmax_stands(name, loss):
    inside, got = step(lambda z: z.log_softmax(1), loss, name, **OPTIONS[name])
    outside, expected = step(lambda z: z, lambda z: loss(z.log_softmax(1)), name, **OPTIONS[name])
    assert inside.loss == pytest.approx(outside.loss, rel=1e-14)
    assert abs(inside.trace - outside.trace) < 1e-6 * abs(outside.trace) != 0
    assert_gradients(got, expected, rtol=2e-5)


ENDS = {
    "module": (nn.LogSoftmax(-1), lambda out: out),
    "tuple": (lambda z: (z.log_softmax(1), z.sum()), lambda out: out[0]),
    "dict": (lambda z: {"log_p": z.log_softmax(1)}, lambda out: out["log_p"]),
    "cloned": (lambda z: z.log_softmax(1).clone(), lambda out: out),
    "first axis": (lambda z: z.T.log_softmax(0), lambda out: out.T),
    "pixels": (lambda z: z.T.reshape(1, 3, 2, 4).log_softmax(1), lambda out: out.flatten(2)[0].T),
}


@every_engine
@pytest.mark.parametrize("name", ENDS)
def test_outputs(engine, name):
    end, unwrap = ENDS[name]
    model, bare = Network(end), Network()
    ask = lambda m, closure: seht.hessian_trace(m, closure, engine=engine, curvature="ggn", seed=1)
    ours = ask(model, lambda: F.nll_loss(unwrap(model(X)), Y))
    truth = ask(bare, lambda: F.cross_entropy(bare(X), Y))
    assert ours.item() == pytest.approx(truth.item(), rel=1e-6) and truth.item() > 0.1


@pytest.mark.parametrize("form", ["scalar", "lean", "autograd"])
@pytest.mark.parametrize("name", ["full", "native"])
def test_the_loss_is_the_plain_one_to_the_last_bit(form, name):
    """A log_softmax more would round once more."""
    model, x = Network(lambda z: z.log_softmax(1), torch.float32), X.float()

    def closure():
        with torch.autocast("cpu", enabled=name == "native", dtype=torch.bfloat16):
            return F.nll_loss(model(x), Y)

    penalty = penalise(model, closure, form, curvature="ggn", precision=name)
    assert penalty.last.loss == closure().item()


@every_engine
def test_an_explicit_boundary_is_taken_at_its_word(engine):
    """Of log-probabilities: G is 0 under a linear loss, and is not where the loss is curved."""
    model = Network(nn.LogSoftmax(1))
    ask = lambda closure, **options: seht.hessian_trace(
        model, closure, engine=engine, curvature="ggn", seed=1, **options
    )
    marked = lambda loss: lambda: loss(seht.boundary(model(X)))
    with pytest.raises(RuntimeError, match=r"log-probabilities.*seht\.boundary\(logits\)"):
        ask(marked(lambda log_p: F.nll_loss(log_p, Y)))
    with pytest.raises(RuntimeError, match=r"log-probabilities.*seht\.boundary\(logits\)"):
        ask(lambda: F.nll_loss(model(X), Y), boundary="end")
    squares = lambda log_p: F.mse_loss(log_p, SOFT)
    tail = Network(nn.LogSoftmax(1))
    # The same network with something behind the log_softmax that hides it.
    tail.end = nn.Sequential(nn.LogSoftmax(1), nn.Unflatten(0, (2, 4)), nn.Flatten(0, 1))
    hidden = seht.hessian_trace(
        tail, lambda: squares(tail(X)), engine=engine, curvature="ggn", seed=1
    )
    assert ask(marked(squares)).item() == pytest.approx(hidden.item(), rel=1e-6)


@every_engine
def test_what_cannot_be_seen_through_is_refused(engine):
    model = Network(lambda z: z.softmax(1).log())
    with pytest.raises(RuntimeError, match=r"log-probabilities.*seht\.boundary\(logits\)"):
        seht.hessian_trace(
            model, lambda: F.nll_loss(model(X), Y), engine=engine, curvature="ggn", seed=1
        )


def test_measuring():
    """tr(G), its largest eigenvalue, and the bound of the logits."""
    nll = lambda model, batch: F.nll_loss(model(batch[0]), batch[1])
    entropy = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    data = [(X, Y)]
    pairs = [
        [
            ask(model, loss)
            for model, loss in ((Network(nn.LogSoftmax(1)), nll), (Network(), entropy))
        ]
        for ask in (
            lambda m, loss: measure.trace(m, loss, data, curvature="ggn", seed=1).estimate,
            lambda m, loss: measure.eigenvalues(m, loss, data, curvature="ggn").largest[0],
            lambda m, loss: measure.bound(m, loss, data).jacobian,
            lambda m, loss: measure.bound(m, loss, data).hessian,
        )
    ]
    for ours, truth in pairs:
        assert ours == pytest.approx(truth, rel=1e-5) and truth > 0
