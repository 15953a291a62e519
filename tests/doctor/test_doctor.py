"""seht.doctor on small models: a right verdict on each, and nothing of the model is changed."""

import copy
import json
import math
import random

import patients
import pytest
import torch
from helpers import same
from torch import nn

import seht
from seht.doctor.cost import Cost, measure_cost
from seht.doctor.curvatures import CurvatureChoice, choose_curvature
from seht.doctor.patient import Patient
from seht.doctor.regime import find_regime, judge
from seht.doctor.report import two_lines
from seht.doctor.shares import PROBES, measure_shares


def patient(model, loss_fn, data, held_out=None):
    return Patient(model, loss_fn, data, held_out, 5.0)


# --- the whole --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    return seht.doctor(*patients.memorising(), budget=5)


def test_the_page_of_a_model_that_memorises(report):
    assert report.ok and report.regime.kind == "memorising" and report.choice.curvature == "ggn"
    said = str(report)
    for words in ("expect a gain", "can be trusted", "hessian, lean",
                  "0.weight", "held-out data", "share=2", " probes"):  # fmt: skip
        assert words in said, said
    assert max(map(len, said.splitlines()[:-2])) <= 100


def test_the_lines_run(report):
    """What is to be pasted trains, as it stands."""
    model, loss_fn, data, held_out = patients.memorising()
    batch, total_steps = data[0], 20
    first, second = report.lines
    names = {"seht": seht, "model": model, "loss_fn": loss_fn, "held_out": held_out}
    names |= {"batch": batch, "total_steps": total_steps}
    exec(first, names)
    for _ in range(total_steps):
        exec(second, names)
        names["loss"].backward()
    assert names["penalty"].last.weight > 0 and names["penalty"].curvature == "ggn"


def test_it_is_plain_data(report):
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["ok"] is True and told["check"]["engines"]["difference"]["verdict"] == "trusted"
    assert told["regime"]["kind"] == "memorising" and told["lines"] == list(report.lines)
    assert [form["form"] for form in told["costs"]["forms"]] == ["scalar", "lean"] * 2


def state(model):
    """Everything that must stay: numbers, gradients, modes, random states."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [t.detach().clone() for t in tensors],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        [module.training for module in model.modules()],
        [len(module._forward_hooks) for module in model.modules()],
        torch.get_rng_state(),
        random.getstate(),
    )


def normalised():
    torch.manual_seed(2)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3)
    model = nn.Sequential(*layers)
    model[2].eval()
    patients.cross_entropy(model, patients.batches()[0]).backward()
    return model


def test_nothing_is_changed():
    model, data = normalised(), patients.batches()
    before, copied = state(model), copy.deepcopy(data)
    report = seht.doctor(model, patients.cross_entropy, data, patients.batches(seed=2), budget=5)
    assert report.ok and same(before, state(model)) and same(copied, data)


@pytest.mark.parametrize("fails_at", [1, 5, 40])
def test_nothing_is_changed_by_a_failure(fails_at):
    model, calls = normalised(), []

    def loss_fn(model, batch):
        calls.append(torch.rand(()))
        random.random()
        if len(calls) >= fails_at:
            raise KeyboardInterrupt
        return patients.cross_entropy(model, batch)

    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        seht.doctor(model, loss_fn, patients.batches(), budget=5)
    assert len(calls) == fails_at and same(before, state(model))


def test_the_seed_repeats_it():
    found = [
        measure_shares(patient(*patients.untrained()), choice(), "auto", seed, math.inf, nobody)
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]


def nobody(done, total):
    pass


def choice(curvature="ggn", boundary=None):
    return CurvatureChoice(curvature, boundary, "")


def test_progress_is_told():
    told = []
    seht.doctor(*patients.untrained(), budget=5, progress=told.append)
    assert list(dict.fromkeys(p.what for p in told)) == [
        "curvature", "gradient", "regime", "share", "cost",
    ]  # fmt: skip
    for name in ("done", "seconds"):  # of the whole, from which the time left is reckoned
        values = [getattr(p, name) for p in told]
        assert values == sorted(values), name


# --- which curvature --------------------------------------------------------------------------


def test_a_loss_without_curvature_in_the_outputs():
    found = choose_curvature(patient(*patients.absolute()), 0)
    assert found.curvature == "hessian" and found.flat and "no curvature" in found.why


def test_a_loss_that_cannot_be_differentiated_twice():
    found = choose_curvature(patient(*patients.connectionist()), 0)
    assert found.curvature == "hessian" and not found.flat and "twice" in found.why
    assert found.arguments == {"curvature": "hessian"}


def test_the_head_is_found():
    found = choose_curvature(patient(*patients.own_loss()), 0)
    assert found.arguments == {"curvature": "ggn", "boundary": "lm_head"}
    report = seht.doctor(*patients.own_loss(), budget=5)
    assert report.ok and 'boundary="lm_head"' in report.lines[0], str(report)


def test_nothing_to_penalise():
    """The absolute value of a piecewise linear network has no trace at all."""
    report = seht.doctor(*patients.absolute(nn.ReLU), budget=5)
    assert report.nothing and not report.ok and "nothing to penalise" in str(report)
    assert "Not now" in report.heading


def test_a_wrong_gradient_is_said():
    from check_problems import Wrong

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Wrong(), nn.Linear(8, 3))
    report = seht.doctor(model, patients.cross_entropy, patients.batches(), budget=5)
    trusted = report.check.engines[report.engine].verdict == "trusted"
    assert report.ok is trusted
    assert report.engine == "difference" or 'engine="autograd"' in report.lines[0]


# --- share, cost ------------------------------------------------------------------------------


def test_the_share_is_that_of_the_penalty():
    """A penalty with share=1 comes to the weight that the doctor calls its unit."""
    model, loss_fn, data, _ = patients.untrained()
    found = measure_shares(patient(model, loss_fn, data), choice(), "auto", 0, math.inf, nobody)
    penalty = seht.HessianTrace(model, share=1.0, curvature="ggn", seed=5)
    for step in range(PROBES + 1):
        penalty(lambda step=step: loss_fn(model, data[step % len(data)]))
    assert found.unit == pytest.approx(penalty.last.weight, rel=0.25)
    assert 0 < found.error < 0.3 and found.probes == PROBES and not found.vanishes
    assert 0.3 < found.noise <= 1  # one probe's gradient is mostly that
    for weight, share in found.weights.items():
        assert share == pytest.approx(weight / found.unit)
    assert set(found.layers) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_every_form_has_its_cost():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 3))
    data = [(torch.randn(256, 8), torch.randint(0, 3, (256,)))]
    costs = measure_cost(patient(model, patients.cross_entropy, data), choice(), 0, 0.2)
    found = {(c.curvature, c.form): c for c in costs.forms}
    assert len(found) == 4 and all(
        c.rounds >= 1 and c.low <= c.ratio <= c.high for c in costs.forms
    )
    # Activations: 13 hidden layers of 256 x 64 floats, half of them kept for the backward pass.
    assert 7 * 256 * 64 * 4 < costs.memory * 2**20 < 30 * 256 * 64 * 4
    assert found["hessian", "lean"].memory < 0.8 * found["hessian", "scalar"].memory
    assert costs.memory < found["ggn", "lean"].memory


def test_a_form_that_cannot_be_had():
    p = patient(*patients.connectionist())
    costs = measure_cost(p, choose_curvature(p, 0), 0, 0.1)
    assert [isinstance(c, Cost) and c.failed is None for c in costs.forms] == [True] * 2 + [
        False
    ] * 2


def test_a_loss_that_comes_with_something_else():
    """Each form has its cost, and the lines take both."""
    model, loss_fn, data, _ = patients.memorising()
    both = lambda model, batch: (loss_fn(model, batch), "aux")
    p = patient(model, both, data)
    costs = measure_cost(p, choice(), 0, 0.1)
    assert [c.failed for c in costs.forms] == [None] * 4
    assert two_lines(choice(), "difference", held_out=False, aux=p.aux)[1].startswith("loss, aux =")
    assert not patient(model, loss_fn, data).aux


def test_a_compiled_model_is_examined_without():
    """As many kinds of pass as the doctor runs are more than PyTorch compiles for one model."""
    model, loss_fn, data, held_out = patients.memorising()
    report = seht.doctor(torch.compile(model, backend="eager"), loss_fn, data, held_out, budget=5)
    assert report.ok and report.model == type(model).__name__
    assert any("compiled" in note for note in report.notes)
    assert "0.weight" in report.shares.layers


# --- the regime -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (patients.memorising, "memorising"),
        (patients.underfitting, "underfitting"),
        (patients.untrained, "untrained"),
        (patients.without_held_out, "unknown"),
    ],
)
def test_the_regime(make, kind):
    found = find_regime(patient(*make()), None, math.inf)
    assert found.kind == kind, found


def test_losses_between():
    train, swapped = [0.5, 0.6, 0.55], [3.0, 3.1, 2.9]
    assert judge(train, swapped, [0.8, 0.75, 0.85])[0] == "between"
    assert judge(train, swapped, [9.0, 0.1, 0.3])[0] == "between"  # one batch is no proof
    assert judge(train, [], [2.0, 2.1, 1.9])[0] == "memorising"


def test_the_training_data_as_held_out_data_show_nothing():
    """Otherwise a model that has all of it by heart would be said to underfit."""
    train, swapped = [0.01, 0.03, 0.02], [3.0, 3.1, 2.9]
    kind, why = judge(train, swapped, [0.03, 0.02, 0.01])
    assert kind == "unknown" and "to the last digit" in why
    assert judge(train, swapped, [0.03, 0.02, 0.010001])[0] == "underfitting"


# --- mistakes ---------------------------------------------------------------------------------

LOSS, DATA = patients.cross_entropy, patients.batches(1)
MISTAKES = {
    "no model": (("net", LOSS, DATA), TypeError, "torch.nn.Module"),
    "no parameters": ((nn.ReLU(), LOSS, DATA), ValueError, "param"),
    "no function": ((patients.network(), "loss", DATA), TypeError, "pass a function"),
    "signature": ((patients.network(), lambda x: x, DATA), TypeError, "with the model and one"),
    "a criterion": ((patients.network(), nn.MSELoss(), DATA), TypeError, "with the model and one"),
    "no loss": ((patients.network(), lambda m, b: m(b[0]), DATA), ValueError, "scalar"),
    "not finite": (
        (patients.network(), lambda m, b: m(b[0]).sum() / 0.0, DATA),
        seht.NonFiniteError,
        "look at",
    ),
    "run out": ((patients.network(), LOSS, iter([])), ValueError, "data gives no batch"),
    "held out run out": ((patients.network(), LOSS, DATA, iter([])), ValueError, "held_out gives"),
    "no data": ((patients.network(), LOSS, 3), TypeError, "data: data must be"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_in_one_line(name):
    arguments, kind, words = MISTAKES[name]
    with pytest.raises(kind) as caught:
        seht.doctor(*arguments, budget=5)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("budget", [0, -1, math.inf, math.nan, "long", True])
def test_a_budget_is_refused(budget):
    with pytest.raises((ValueError, TypeError), match="budget"):
        seht.doctor(*patients.untrained(), budget=budget)


def test_every_stage_is_named_however_soon_it_comes(capsys):
    from seht.doctor.examine import _STAGES, _Stages

    stages = _Stages(True, _STAGES[0])
    for name in _STAGES:
        stages.begin(name)
    said = capsys.readouterr().err
    assert all(name in said for name in _STAGES)
