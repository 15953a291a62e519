"""Verdicts: wrong engines are caught and the culprit is named; what is not known is not claimed."""

import dataclasses
import json
import os

import pytest
import torch
import torch.nn.functional as F
from check_problems import (
    OnceSine,
    Wrong,
    WrongBlock,
    WrongTanh,
    cross_entropy,
    flat,
    images,
    resnet,
)
from helpers import Reverse
from torch import nn
from torch.nn.utils import parametrizations

import seht
from seht.check import judge
from seht.engines import ENGINES, AutogradEngine
from seht.operators import orders, safe_forms

# --- wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "module", "kind"),
    [
        (lambda: flat(nn.ReLU(), Wrong()), "3", "Wrong"),
        (lambda: flat(nn.ReLU(), WrongBlock()), "3", "WrongBlock"),
        (lambda: nn.Sequential(Wrong(), nn.BatchNorm2d(3), resnet()), None, None),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), Wrong(), resnet()), "1", "Wrong"),
    ],
    ids=["module", "block", "on constants only", "before a resnet"],
)
def test_a_wrong_double_backward_is_named(make, module, kind):
    torch.manual_seed(2)
    report = seht.check(make(), cross_entropy, images())
    found = report.engines["autograd"]
    if module is None:  # its input needs no gradient, so nothing is wrong
        assert report.ok, str(report)
        return
    assert not report.ok
    assert (found.verdict, found.module, found.kind) == ("wrong", module, kind), str(found)
    assert found.error > 0.01
    for words in ("is WRONG", f"because of module {module!r} ({kind})", "use engine='difference'"):
        assert words in str(report)
    assert report.engines["difference"].verdict == "trusted", str(report)


def test_a_function_without_a_double_backward_is_named():
    """Its second derivative would silently be 0; the engine refuses it, and says which it is."""
    report = seht.check(flat(Wrong(OnceSine)), cross_entropy, images())
    found = report.engines["autograd"]
    assert (found.verdict, found.module, found.kind) == ("failed", "2", "Wrong"), str(found)
    assert "OnceSine has no double backward" in str(report)
    assert report.engines["difference"].verdict == "trusted", str(report)


def test_wrong_between_modules():
    def loss_fn(model, batch):
        return F.cross_entropy(WrongTanh.apply(model(batch[0])), batch[1])

    found = seht.check(flat(nn.ReLU()), loss_fn, images()).engines["autograd"]
    assert (found.verdict, found.module) == ("wrong", None)
    assert "no single module is to blame" in str(found)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = flat(nn.ReLU())

        def forward(self, x):
            return WrongTanh.apply(self.inner(x))

    found = seht.check(Net(), cross_entropy, images()).engines["autograd"]
    assert (found.module, found.kind) == ("", "Net")
    assert "because of the model's own forward (Net)" in str(found)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (resnet, "BatchNorm2d", "a third derivative is wrong"),
        (lambda: flat(nn.LayerNorm(8), nn.ReLU()), "LayerNorm", "a third derivative is wrong"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), flat_from(4 * 36)),
            "InstanceNorm2d",
            "a third derivative is wrong",
        ),
        (
            lambda: flat(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()),
            "_WeightNorm",
            "a second derivative is wrong",
        ),
    ],
    ids=["batch norm", "layer norm", "instance norm", "weight norm"],
)
def test_with_the_fused_operators_the_norm_is_named(monkeypatch, make, kind, words):
    monkeypatch.setattr(safe_forms, "SAFE", {})
    monkeypatch.setattr(orders, "WRONG", {})
    torch.manual_seed(4)
    report = seht.check(make(), cross_entropy, images())
    found = report.engines["autograd"]
    assert (found.verdict, found.kind) == ("wrong", kind), str(found)
    assert words in str(found)
    assert report.engines["difference"].verdict == "trusted"


def flat_from(features):
    return nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(features, 4))


class Branch(nn.Module):
    """Two networks of which one is let through by a factor, a product of two weights."""

    def __init__(self, gate):
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Wrong())
        self.gates = nn.ParameterList(torch.full((1,), gate**0.5) for _ in range(2))

    def forward(self, x):
        return self.main(x).sin() + self.gates[0] * self.gates[1] * self.side(x)


def test_gates_that_start_from_zero_hide_nothing():
    """At the user's own weights nothing is wrong yet, at any order."""
    found = seht.check(flat(Branch(0.0)), cross_entropy, images()).engines["autograd"]
    assert (found.verdict, found.module) == ("wrong", "2.side.1"), str(found)


def test_a_wrong_module_that_adds_little_is_found():
    """The whole gradient is off by less than the tolerance, that of the branch by its own size."""
    found = seht.check(flat(Branch(1e-5)), cross_entropy, images()).engines["autograd"]
    assert (found.verdict, found.module) == ("wrong", "2.side.1"), str(found)
    assert found.error > 0.01


# --- engines of the registry ------------------------------------------------------------------


def engine_that(change):
    class Changed(AutogradEngine):
        name = "changed"

        def estimate(self, task, **options):
            return change(super().estimate(task, **options))

    return Changed


def twist_gradient(estimate):
    trace = estimate.trace
    estimate.trace = trace.detach() + 1.01 * (trace - trace.detach())
    return estimate


def fail(estimate):
    raise RuntimeError("not today\nnor tomorrow")


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (lambda e: e, "trusted", "can be trusted"),
        (twist_gradient, "wrong", "the trace itself is right"),
        (lambda e: dataclasses.replace(e, trace=e.trace * 1.01), "wrong", "already the trace"),
        (
            lambda e: dataclasses.replace(e, trace=e.trace.detach()),
            "wrong",
            "the trace itself is r",
        ),
        (lambda e: dataclasses.replace(e, trace=e.trace * torch.nan), "wrong", "is WRONG"),
        (lambda e: dataclasses.replace(e, loss=e.loss * 1.01), "wrong", "is WRONG"),
        (fail, "failed", "FAILED: not today nor tomorrow"),
    ],
    ids=["right", "gradient", "trace", "detached", "nan", "loss", "raises"],
)
def test_every_engine_of_the_registry_is_checked(monkeypatch, change, verdict, words):
    monkeypatch.setitem(ENGINES, "changed", engine_that(change))
    report = seht.check(flat(nn.ReLU()), cross_entropy, images(), engines=["changed", "autograd"])
    assert list(report.engines) == ["changed", "autograd"]
    assert report.engines["changed"].verdict == verdict
    assert words in str(report)
    assert report.engines["autograd"].verdict == "trusted"
    if verdict != "trusted":
        assert not report.ok and "use engine='autograd'" in str(report.engines["changed"])
        assert report.engines["changed"].module is None  # it is wrong everywhere
    json.dumps(report.as_dict(), allow_nan=False)


def test_an_operator_without_second_derivative():
    class Distances(nn.Module):
        def forward(self, x):
            return torch.cdist(x, x + 1, p=3.0)

    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), Distances(), nn.Linear(6, 4))
    found = seht.check(model, cross_entropy, images()).engines["autograd"]
    assert (found.verdict, found.module, found.kind) == ("failed", "2", "Distances")
    for words in ("FAILED", "no second derivative", "engine='difference'"):
        assert words in str(found)


def test_a_compiled_model_is_checked_as_it_is():
    model = torch.compile(flat(nn.ReLU()), backend="eager")
    found = seht.check(model, cross_entropy, images(), engines="autograd").engines["autograd"]
    assert found.verdict == "failed" and "compiled" in found.reason


# --- inconclusive -----------------------------------------------------------------------------


class Stateful(nn.Module):
    seen = 0

    def forward(self, x):
        self.seen += 1
        return x * self.seen


class Entropy(nn.Module):
    def forward(self, x):
        return x * (1 + int.from_bytes(os.urandom(4), "big") / 2**32)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Stateful, "cannot be repeated"),
        (Entropy, "cannot be repeated"),
        (lambda: nn.Sequential(nn.Tanh(), Wrong(Reverse)), "gradient reversal"),
    ],
    ids=["state", "entropy", "gradient reversal"],
)
def test_inconclusive_is_said_and_is_not_trust(layer, words):
    report = seht.check(flat(layer()), cross_entropy, images(), engines="autograd")
    found = report.engines["autograd"]
    assert found.verdict == "inconclusive" and not report.ok
    assert "inconclusive, no promise" in str(report) and words in str(report)
    assert "trusted" not in str(report)


def test_compiled_functions_are_compiled_again_afterwards():
    seht.check(flat(nn.ReLU()), cross_entropy, images(), engines="autograd", directions=1)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(2))
    assert len(frames) == 1


def test_no_engine_is_blamed_for_a_loss_that_fails_at_other_weights(monkeypatch):
    def measure(*_):
        raise ValueError("only those weights")

    monkeypatch.setattr(judge, "measure", measure)
    found = seht.check(flat(nn.ReLU()), cross_entropy, images()).engines["autograd"]
    assert found.verdict == "inconclusive"
    assert "cannot be computed at other weights: only those weights" in str(found)


# --- little time ------------------------------------------------------------------------------


def test_without_time_one_direction_is_judged_and_said():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5), nn.Tanh(), nn.Linear(5, 4))
    report = seht.check(model, cross_entropy, images(), engines="difference", budget=0)
    found = report.engines["difference"]
    assert report.ok and found.directions == 1 and "over 1 direction" in str(found), str(found)


def test_without_time_what_one_direction_says_is_no_verdict():
    torch.manual_seed(2)
    report = seht.check(flat(Wrong()), cross_entropy, images(), engines="autograd", budget=0)
    found = report.engines["autograd"]
    assert found.verdict == "inconclusive" and "raise budget=" in str(found), str(found)
    with pytest.raises(ValueError, match="number of seconds"):
        seht.check(flat(nn.ReLU()), cross_entropy, images(), budget="1 min")
