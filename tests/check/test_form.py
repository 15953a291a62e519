"""seht.check judges what will be run: its curvature, boundary and estimator, as it adapts."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
import torch.nn.functional as F
from check_problems import Wrong, cross_entropy, flat, images, resnet
from torch import nn

import seht
from seht.check.sandbox import Form, Sandbox
from seht.check.truth import measure
from seht.engines import ENGINES, DifferenceEngine
from seht.estimators import SehtD, SehtH

NEED = 2.5e-4


# --- the truth --------------------------------------------------------------------------------


class Bent(nn.Module):
    """z = w^2, so that with L = sum z^3 the Gauss-Newton trace can be written down."""

    def __init__(self):
        super().__init__()
        start = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))
        self.w = nn.Parameter(start.double())

    def forward(self):
        return self.w.square()


@pytest.mark.parametrize("probes", [1, 3])
def test_gauss_newton_against_a_formula(probes):
    """G = (2w)^2 6z = 24 w^4, whatever the signs; tr(H) would be 30 w^4."""
    form = Form("ggn", None, SehtH(probes=probes))
    box = Sandbox(Bent(), lambda model, batch: model().pow(3).sum(), None, None, 0, form)
    truth, w = measure(box, 5, NEED), box.model.w.detach()
    assert truth.trace.value.item() == pytest.approx((24 * w**4).sum().item(), rel=1e-6)
    expected = (96 * w**3).flatten()
    torch.testing.assert_close(truth.parts["w"].value, expected, rtol=1e-4, atol=1e-3)


def test_a_partial_trace_and_its_scale():
    form = Form(estimator=SehtD(prob=0.3, layer_prob=1.0, rescale=True))
    box = Sandbox(Bent(), lambda model, batch: model().square().sum(), None, None, 0, form)
    truth, w = measure(box, 5, NEED), box.model.w.detach()
    kept = next(box.task(5).probes())["w"].double().abs()
    assert 0 < kept.sum() < w.numel()
    expected = (12 * w**2 * kept).sum().item() / 0.6
    assert truth.trace.value.item() == pytest.approx(expected, rel=1e-6)


# --- verdicts ---------------------------------------------------------------------------------


def log_probabilities(model, batch):
    return F.nll_loss(model(batch[0]).log_softmax(-1), batch[1])


def marked(model, batch):
    return F.cross_entropy(seht.boundary(3 * model(batch[0])).sin(), batch[1])


class OwnLoss(nn.Module):
    """Returns its own loss, as Hugging Face's models do; casts to float32 on the way."""

    def __init__(self):
        super().__init__()
        self.net, self.head = flat(nn.Tanh(), nn.Linear(8, 8), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, x, y):
        logits = self.head(self.net(x))
        return {"loss": F.cross_entropy(logits.float(), y), "logits": logits}


FORMS = {
    "resnet": (resnet, cross_entropy, {}),
    "log-probabilities": (lambda: flat(nn.LogSoftmax(-1), nn.Tanh()), log_probabilities, {}),
    "log-probabilities put out": (
        lambda: flat(nn.Tanh()).append(nn.LogSoftmax(-1)),
        lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
        {},
    ),
    "marked": (lambda: flat(nn.ReLU()), marked, {}),
    "boundary": (OwnLoss, lambda model, batch: model(*batch)["loss"], {"boundary": "head"}),
    "inner boundary": (lambda: flat(nn.Tanh()), cross_entropy, {"boundary": "1"}),
    "seht-d": (resnet, cross_entropy, {"estimator": "seht-d", "prob": 0.3}),
}


@pytest.mark.parametrize("name", FORMS)
def test_gauss_newton_is_judged(name):
    torch.manual_seed(1)
    make, loss_fn, options = FORMS[name]
    report = seht.check(make(), loss_fn, images(), curvature="ggn", **options)
    assert report.ok and list(report.engines) == list(ENGINES), str(report)
    found = report.engines["difference"]
    assert found.own < 0.05 and found.steps > 6 and found.kappa[0] <= found.kappa[1]
    assert "curvature='ggn'" in str(report) and "own precision after" in str(report)
    assert report.as_dict()["boundary"] == options.get("boundary")


def test_a_wrong_module_is_named_under_gauss_newton():
    torch.manual_seed(2)
    report = seht.check(flat(nn.ReLU(), Wrong()), cross_entropy, images(), curvature="ggn")
    found = report.engines["autograd"]
    assert (found.verdict, found.module, found.kind) == ("wrong", "3", "Wrong"), str(found)
    assert report.engines["difference"].verdict == "trusted", str(report)


def test_a_loss_without_curvature_has_no_gauss_newton_trace():
    loss_fn = lambda model, batch: (model(batch[0]) - 1).abs().mean()
    report = seht.check(flat(nn.Tanh()), loss_fn, images(), curvature="ggn", engines="auto")
    found = report.engines["difference"]
    assert found.verdict == "failed" and "no curvature in the model's outputs" in found.reason


def test_casts_to_float32_inside_are_widened():
    class Cast(nn.Module):
        def forward(self, x):
            return x.to(torch.float32).tanh().to(x.dtype) + x.half().float().sin().to(x.dtype)

    report = seht.check(flat(nn.Tanh(), Cast()), cross_entropy, images(), engines="autograd")
    assert report.engines["autograd"].error < 1e-4, str(report)


class Drifting(DifferenceEngine):
    """Takes a step ten times as large each time, whatever it sees."""

    name = "drifting"

    def estimate(self, task, **options):
        self.steps.kappa = 10 * (self.steps.kappa or 1e-4)
        self.steps.fixed = True
        return super().estimate(task, **options)


NOISE = {
    "randn_like": lambda h: h + torch.randn_like(h),
    "a distribution": lambda h: h + torch.distributions.Normal(h * 0, h * 0 + 1).rsample(),
    "normal_": lambda h: h + torch.empty_like(h).normal_(),
    "a path dropped": lambda h: h * (torch.rand(len(h), 1, dtype=h.dtype) + 0.8).floor(),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.8)),
    "asked for": lambda h: h + torch.randn(h.shape, dtype=torch.float32),
}


@pytest.mark.parametrize("name", NOISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_the_same_in_every_precision(name, dtype):
    """A seed gives other numbers in float64: every such model was said to be imprecise."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.last(NOISE[name](self.first(x).tanh()))

    torch.manual_seed(1)
    batch = torch.randn(12, 6).to(dtype), torch.randint(0, 3, (12,))
    loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    options = {"curvature": "ggn", "engines": "difference", "directions": 1}
    report = seht.check(Noisy().to(dtype), loss_fn, batch, **options)
    assert report.ok and report.engines["difference"].own < 0.05, str(report)


def test_a_drifting_step_is_seen(monkeypatch):
    """Along the first probe it is right."""
    monkeypatch.setitem(ENGINES, "drifting", Drifting)
    once = seht.check(flat(nn.Tanh()), cross_entropy, images(), engines="drifting", directions=1)
    found = once.engines["drifting"]
    assert found.error < 1e-3 and found.kappa[1] > 100 * found.kappa[0], str(found)
    assert found.verdict == "imprecise" and not once.ok and "IMPRECISE" in str(once)


def test_a_probe_for_each_example_has_no_such_truth():
    report = seht.check(flat(nn.Tanh()), cross_entropy, images(), estimator="seht-s")
    found = report.engines["difference"]
    assert (found.verdict, list(report.engines)) == ("inconclusive", ["difference"])
    assert "check that" in found.reason
    coupled = seht.check(resnet(), cross_entropy, images(), estimator="seht-s")
    assert coupled.engines["difference"].verdict == "failed"  # examples meet in BatchNorm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"curvature": "gnn"}, "did you mean 'ggn'"),
        ({"boundary": "nowhere"}, "no module 'nowhere'"),
        ({"estimator": "seht-x"}, "unknown estimator"),
        ({"estimator": "seht-s", "engines": "autograd"}, "needs engine='difference'"),
        ({"curvatur": "ggn"}, "did you mean 'curvature'"),
        ({"estimator": "seht-d", "prob": 1e-9}, "raise prob="),
    ],
)
def test_bad_forms(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        seht.check(flat(nn.Tanh()), cross_entropy, images(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_a_language_model_gets_a_verdict(curvature):
    """It casts its logits to float32 for the loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.GPT2LMHeadModel(config).train(), torch.randint(20, (4, 8))
    head = "lm_head" if curvature == "ggn" else None
    loss_fn = lambda model, batch: model(batch, labels=batch).loss
    report = seht.check(
        model, loss_fn, tokens, curvature=curvature, boundary=head, engines="auto", directions=2
    )
    assert report.ok, str(report)
