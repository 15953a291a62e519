"""Bad input: an error of the right kind that names the fix, and nothing changed."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot, batch, closure_of, every_engine, network, own_state
from torch import nn

import seht
from seht import cli
from seht.errors import nearest, unknown, warn

WEIGHT = 0.01


# --- when the object is made ------------------------------------------------------------------


def nothing(name, tensor):
    return False


OPTIONS = [
    ({"weight": -1.0}, ValueError, "not negative"),
    ({"weight": math.nan}, ValueError, "finite"),
    ({"weight": math.inf}, ValueError, "finite"),
    ({"weight": "0.1"}, ValueError, "a number, a path or 'tuned'"),
    ({"weight": True}, TypeError, "number"),
    ({"every": 0}, ValueError, "every must be at least 1"),
    ({"every": 1.5}, TypeError, "every must be a whole number"),
    ({"warmup": -1}, ValueError, "warmup must be at least 0"),
    ({"ramp": -1}, ValueError, "ramp must be at least 0"),
    ({"accumulate": 0}, ValueError, "accumulate must be at least 1"),
    ({"limit": 0.0}, ValueError, "limit must be a positive finite number"),
    ({"limit": math.nan}, ValueError, "limit must be a positive finite number"),
    ({"on_nonfinite": "skp"}, ValueError, "did you mean 'skip'"),
    ({"warmpu": 5}, ValueError, "did you mean 'warmup'"),
    ({"curvatur": "ggn"}, ValueError, "did you mean 'curvature'"),
    ({"kapa": 0.1}, ValueError, "did you mean 'kappa'"),
    ({"boundary": 3}, TypeError, "boundary must be the name of a module"),
    ({"boundary": "hed"}, ValueError, "has no module 'hed'"),
    ({"optimizer": torch.optim.AdamW}, TypeError, "optimizer must be the training's optimiser"),
    ({"seed": 1.0}, TypeError, "seed must be a whole number"),
    ({"estimator": "seth-h"}, ValueError, "did you mean 'seht-h'"),
    ({"estimator": 3}, TypeError, "seht.SehtH()"),
    ({"estimator": seht.SehtH}, TypeError, "estimator object"),
    ({"estimator": seht.SehtH(), "probes": 2}, ValueError, "where the object is made"),
    ({"engine": "autgrad"}, ValueError, "did you mean 'autograd'"),
    ({"curvature": "hesian"}, ValueError, "did you mean 'hessian'"),
    ({"prob": 0.1}, ValueError, "prob is an option of seht-d, not of seht-h"),
    ({"estimator": "seht-d", "prop": 0.1}, ValueError, "did you mean 'prob'"),
    ({"estimator": "seht-d", "prob": 0.0}, ValueError, r"in \(0, 0.5\]"),
    ({"estimator": "seht-d", "prob": 0.6}, ValueError, r"in \(0, 0.5\]"),
    ({"estimator": "seht-d", "prob": math.nan}, ValueError, r"in \(0, 0.5\]"),
    ({"estimator": "seht-d", "layer_prob": 0}, ValueError, r"in \(0, 1\]"),
    ({"estimator": "seht-d", "layer_prob": 1.1}, ValueError, r"in \(0, 1\]"),
    ({"probes": 0}, ValueError, "probes must be at least 1"),
    ({"probes": 2.0}, TypeError, "probes must be a whole number"),
    ({"distribution": "gausian"}, ValueError, "did you mean 'gaussian'"),
    ({"params": "1.wieght"}, ValueError, "did you mean '1.weight'"),
    ({"params": ["0.weight", "encoder.*"]}, ValueError, "matches 'encoder"),
    ({"params": [0]}, TypeError, "names or glob patterns"),
    ({"params": []}, ValueError, "chooses no trainable parameter"),
    ({"params": nothing}, ValueError, "chooses no trainable parameter"),
]


def label(value):
    # An address in a name would differ from one test process to the next.
    return "params: nothing" if nothing in getattr(value, "values", tuple)() else str(value)[:40]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=label)
def test_options(options, error, message):
    model = network()
    before = Snapshot(model)
    with pytest.raises(error, match=message) as caught:
        seht.HessianTrace(model, **({"weight": WEIGHT} | options))
    assert "\n" not in str(caught.value)
    Snapshot(model).assert_same(before)


@pytest.mark.parametrize(
    "function", [seht.hessian_trace, seht.loss_and_trace], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [row for row in OPTIONS if row[0].keys() & {"seed", "estimator", "engine", "probes", "params"}],
    ids=label,
)
def test_options_of_the_functions(function, options, error, message):
    model = network()
    before = Snapshot(model)
    with pytest.raises(error, match=message):
        function(model, closure_of(model), **options)
    Snapshot(model).assert_same(before)


@pytest.mark.parametrize("model", [None, 3, "model", nn.Linear, torch.ones(2)], ids=str)
def test_not_a_module(model):
    for make in (
        lambda: seht.HessianTrace(model, weight=WEIGHT),
        lambda: seht.hessian_trace(model, lambda: None),
        lambda: seht.loss_and_trace(model, lambda: None),
        lambda: seht.exact_trace(model, lambda: None),
    ):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not"):
            make()


def test_models_without_anything_to_probe():
    frozen = network().requires_grad_(False)
    for model, message in (
        (frozen, "every parameter of the model is frozen; set requires_grad_"),
        (nn.ReLU(), "no parameters"),
        (nn.BatchNorm1d(3), 'params="\\*"'),
    ):
        with pytest.raises(ValueError, match=message):
            seht.HessianTrace(model, weight=WEIGHT)


def test_a_model_frozen_after_the_penalty_was_made():
    model = network()
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    model.requires_grad_(False)
    before = Snapshot(model)
    with pytest.raises(ValueError, match="frozen"):
        penalty(closure_of(model))
    assert penalty.step == 0
    Snapshot(model).assert_same(before)


def test_parameters_on_several_devices():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"several devices.*choose the parameters of one device"):
        seht.HessianTrace(model, weight=WEIGHT)


# --- when it is called ------------------------------------------------------------------------


def bad_losses(model):
    """What closures may wrongly return: (name, closure, error, message)."""
    x, y = batch()
    good = closure_of(model)
    return {
        "vector": (
            lambda: F.cross_entropy(model(x), y, reduction="none"), ValueError, r"\.mean\(\)",
        ),
        "shape (1,)": (lambda: good().reshape(1), ValueError, "must be a scalar"),
        "number": (lambda: good().item(), TypeError, "not loss.item()"),
        "None": (lambda: [good(), None][1], TypeError, "None; its last line should return"),
        "three": (lambda: (good(), 1, 2), TypeError, "a tuple of 3; put the rest into one aux"),
        "dictionary": (lambda: {"loss": good()}, TypeError, "dict; return its loss"),
        "count": (lambda: (good() > 0).sum(), TypeError, "a differentiable loss such as"),
        "integer": (lambda: good().long(), TypeError, "floating"),
        "detached": (lambda: good().detach(), RuntimeError, "no graph.*detach"),
        "nan": (lambda: good() * math.nan, seht.NonFiniteError, "loss is nan"),
        "inf": (lambda: good() + math.inf, seht.NonFiniteError, "loss is inf"),
        "no loss but aux": (lambda: (None, good()), TypeError, "scalar tensor"),
    }  # fmt: skip


NAMES = list(bad_losses(network()))


@every_engine
@pytest.mark.parametrize("name", NAMES)
def test_bad_losses_on_a_penalised_step(engine, name):
    model = network()
    model(batch()[0]).sum().backward()
    closure, error, message = bad_losses(model)[name]
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    before, state = Snapshot(model), own_state(penalty)
    with pytest.raises(error, match=message):
        penalty(closure)
    Snapshot(model).assert_same(before)
    assert own_state(penalty) == state and penalty.last is None
    penalty(closure_of(model)).backward()  # and it goes on
    assert penalty.last.step == 0


@pytest.mark.parametrize("name", NAMES)
def test_bad_losses_on_a_plain_step(name):
    """The loss is looked at on every call with weight > 0: warm-up must not hide a mistake."""
    model = network(norm=False)
    closure, error, message = bad_losses(model)[name]
    penalty = seht.HessianTrace(model, weight=WEIGHT, warmup=5)
    before, state = Snapshot(model), own_state(penalty)
    with pytest.raises(error, match=message):
        penalty(closure)
    Snapshot(model).assert_same(before)
    assert own_state(penalty) == state


@every_engine
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("nan", "inf")])
def test_bad_losses_of_the_functions(engine, name):
    """They hand over what is not finite as it is."""
    model = network()
    closure, error, message = bad_losses(model)[name]
    before = Snapshot(model)
    for function in (seht.hessian_trace, seht.loss_and_trace):
        with pytest.raises(error, match=message):
            function(model, closure, engine=engine)
    with pytest.raises(error, match=message):
        seht.exact_trace(model, closure)
    Snapshot(model).assert_same(before)


@pytest.mark.parametrize("closure", [None, torch.ones(()), 1.0], ids=str)
def test_a_closure_that_is_not_callable(closure):
    model = network()
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    for call in (penalty, lambda c: seht.hessian_trace(model, c)):
        with pytest.raises(TypeError, match="pass a function that computes the loss"):
            call(closure)
    assert penalty.step == 0


@every_engine
def test_a_closure_that_raises(engine):
    model = network(dropout=0.5)
    inner = closure_of(model)

    def closure():
        inner()
        raise KeyError("mine")

    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    before, state = Snapshot(model), own_state(penalty)
    with pytest.raises(KeyError, match="mine"):
        penalty(closure)
    Snapshot(model).assert_same(before, random=False)
    assert own_state(penalty) == state
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("weight", [-1.0, math.nan, "much"])
def test_a_weight_function_that_returns_nonsense(weight):
    model = network()
    penalty = seht.HessianTrace(model, weight=lambda step: weight)
    before = Snapshot(model)
    with pytest.raises((ValueError, TypeError), match="weight must be"):
        penalty(closure_of(model))
    assert penalty.step == 0
    Snapshot(model).assert_same(before)


@every_engine
def test_a_parameter_chosen_by_name_that_the_loss_does_not_use(engine):
    model = network()
    model.extra = nn.Linear(3, 3).double()
    stem = nn.Sequential(*list(model)[:-1])
    x, y = batch()
    penalty = seht.HessianTrace(model, weight=WEIGHT, params="extra.weight", engine=engine)
    before = Snapshot(model)
    with pytest.raises(ValueError, match=r"does not depend on parameter 'extra.weight'.*remove it"):
        penalty(lambda: F.cross_entropy(stem(x), y))
    Snapshot(model).assert_same(before)
    assert penalty.step == 0


@pytest.mark.parametrize("wrap", ["compile", "script"])
def test_compiled_and_scripted_modules_with_the_autograd_engine(wrap):
    model = network(norm=False)
    model = torch.compile(model, backend="eager") if wrap == "compile" else torch.jit.script(model)
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine="autograd")
    with pytest.raises(RuntimeError, match=f"{wrap}.*pass the "):
        penalty(closure_of(model))
    assert penalty.step == 0


# --- names that nobody knows ------------------------------------------------------------------


def test_a_short_list_of_names_is_told_whole_and_a_long_one_by_its_nearest():
    assert unknown("engine", "autgrad", ["autograd", "difference"]) == (
        "unknown engine 'autgrad'; did you mean 'autograd'? (known: autograd, difference)"
    )
    fields = [f"--part{i}.option-{j}" for i in range(8) for j in range(8)]
    said = unknown("option", "--part3.opton-5", fields)
    assert "did you mean '--part3.option-5'? (the nearest of 64: --part3.option-5, " in said
    assert len(said) < 300
    assert "did you mean" not in unknown("option", "xyz", fields)


def test_a_misspelt_option_of_the_lab_is_answered_in_a_line_that_can_be_read(capsys):
    pytest.importorskip("lightning_fabric")
    assert cli.main(["train", "digits", "--epcohs", "3"]) == 2
    said = capsys.readouterr().err
    assert "did you mean '--epochs'" in said
    assert len(said) < 320


# --- a misspelt option ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "option", "near"),
    [
        ("trace", "probs", "probes"),
        ("eigenvalues", "k", None),
        ("eigenvalues", "larges", "largest"),
        ("density", "prob", "probes"),
        ("landscape", "curvature", None),  # an option of others, which would be passed over here
        ("sharpness", "again", None),  # an argument of the inner function
        ("robustness", "bit", "bits"),
        ("stability", "what", None),
        ("bound", "params", None),
        ("bound", "bounary", "boundary"),
        ("Tracker", "per_layr", "per_layer"),
        ("Tracker", "evry", "every"),
    ],
)
def test_a_measuring_function_names_itself_and_its_options(function, option, near):
    model = network()
    with pytest.raises(TypeError) as error:
        getattr(seht.measure, function)(model, loss_of, batch(), **{option: 2})
    said = str(error.value)
    assert said.startswith(f"{function}(): unknown option {option!r}") and "\n" not in said
    assert "seed" in said and "micro_batch" in said
    assert f"did you mean {near!r}" in said if near else "did you mean" not in said


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("call", "option", "near"),
    [
        (lambda m, **o: seht.HessianTrace(m, weight=1.0, **o), "warmpu", "warmup"),
        (lambda m, **o: seht.check(m, loss_of, batch(), **o), "tolerence", "tolerance"),
        (lambda m, **o: seht.check(m, loss_of, batch(), **o), "sed", "seed"),
        (lambda m, **o: seht.hessian_trace(m, closure_of(m), **o), "curvatur", "curvature"),
        (lambda m, **o: seht.hessian_trace(m, closure_of(m), **o), "kapa", "kappa"),
        (lambda m, **o: seht.loss_and_trace(m, closure_of(m), **o), "enginee", "engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_other_functions_do_too(call, option, near):
    with pytest.raises(ValueError, match=f"unknown option '{option}'; did you mean '{near}'") as e:
        call(network(), **{option: 1})
    assert re.match(r"(HessianTrace|check|hessian_trace|loss_and_trace)\(.*\): ", str(e.value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("measure --sampels 3", "seht measure: error: .*'--sampels'; did you mean '--samples'"),
        ("doctor a:b --buget=3", "seht doctor: error: .*'--buget'; did you mean '--budget'"),
        ("check a:b --directons 3", "did you mean '--directions'"),
        ("bench --fasst", "seht bench: error: unknown option '--fasst'; did you mean '--fast'"),
        ("chekc", "unknown choice 'chekc'; did you mean 'check'"),
        ("doctor a:b c", "unrecognized arguments: c"),
    ],
)
def test_the_command_line_does_too(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments.split())
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_dashes_make_no_option_like_another():
    assert nearest("--tolrance", ["--json", "--split", "--level"], beside="-") == ""
    assert nearest("--levle", ["--json", "--level"], beside="-") == "; did you mean '--level'?"


def test_a_warning_to_code_without_a_module_name():
    with pytest.warns(seht.PenaltyWarning, match="late"):
        exec("warn('late')", {"warn": warn})
