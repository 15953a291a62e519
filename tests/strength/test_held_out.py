"""weight="tuned": what it asks of held-out data, what it leaves alone, what it refuses."""

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht

FREE = seht.Tuning(gap=0.0)
"""Moves from the first look on, whether or not anything is memorised."""
X, Y = torch.randn(64, 6), torch.randint(0, 3, (64,))
XV, YV = torch.randn(32, 6), torch.randint(0, 3, (32,))


def network(dropout=0.2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
    )


def training_loss(model):
    return lambda: F.cross_entropy(model(X), Y)


def held_out_loss(model):
    return lambda: F.cross_entropy(model(XV), YV)


def trained(model, penalty, steps, form="scalar", held_out=True, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    more = {"held_out": held_out_loss(model)} if held_out else {}
    for _ in range(steps):
        optimizer.zero_grad()
        if form == "scalar":
            penalty(training_loss(model), **more).backward()
        else:
            penalty.backward(training_loss(model), **more)
        optimizer.step()
    return penalty


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_the_weight_moves_and_its_path_is_kept(form, curvature):
    model = network()
    penalty = seht.HessianTrace(model, weight=FREE, curvature=curvature, total_steps=60, every=2)
    trained(model, penalty, 60, form)
    path = penalty.path
    assert penalty.schedule.total_steps == 60 and len(path.weights) == 30 - 8 + 1
    assert len(set(path.weights)) > 1 and all(a < 1 for a in path.positions)
    assert penalty.last is not None and math.isfinite(penalty.last.loss)


def test_held_out_data_move_neither_statistics_nor_random_state():
    """A training whose weight is held in place by `travel` is that of a fixed path, bit for bit."""
    still = seht.Tuning(travel=1e-300, gap=0.0)
    model, other = network(), network()
    tuned = seht.HessianTrace(model, weight=still, curvature="ggn", total_steps=40, seed=1)
    torch.manual_seed(5)
    trained(model, tuned, 40)
    drawn = torch.rand(3)
    # The same without held-out data: a share of the same size, measured on the same steps.
    shared = seht.HessianTrace(other, share=still.start, curvature="ggn", seed=1)
    torch.manual_seed(5)
    trained(other, shared, 40, held_out=False)
    assert torch.equal(drawn, torch.rand(3))
    assert tuned.last.weight == pytest.approx(shared.last.weight, rel=1e-12)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_look_leaves_the_model_in_its_mode(form):
    """Also where the closure calls eval() and forgets train(), or fails in between."""
    model = network()
    model[1].eval()  # frozen statistics, as in fine-tuning
    penalty = seht.HessianTrace(model, weight=FREE, curvature="ggn", total_steps=60)
    fails = False

    def held_out():
        model.eval()
        if fails:
            raise ConnectionError("the file is gone")
        return F.cross_entropy(model(XV), YV)

    run = penalty if form == "scalar" else penalty.backward
    modes = [module.training for module in model.modules()]
    for _ in range(10):
        run(training_loss(model), held_out=held_out)
        assert [module.training for module in model.modules()] == modes
    fails = True
    with pytest.raises(ConnectionError):
        run(training_loss(model), held_out=held_out)
    assert [module.training for module in model.modules()] == modes


def test_a_loader_is_begun_again_and_shuffles_nothing_else():
    model = network()
    data = TensorDataset(XV, YV)
    loader = DataLoader(data, batch_size=16)
    read = []

    def loss_fn(model, batch):
        read.append(batch[1].tolist())
        return F.cross_entropy(model(batch[0]), batch[1])

    penalty = seht.HessianTrace(
        model, weight="tuned", curvature="ggn", total_steps=20, held_out=(loader, loss_fn)
    )
    trained(model, penalty, 20, held_out=False)
    assert len(read) == 20 - 8
    assert read[0] == YV[:16].tolist() == read[2] and read[1] == YV[16:].tolist() == read[3]


OPTIMIZERS = {
    "momentum": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 3e-3),
}


@pytest.mark.parametrize(
    "optimizer, form",
    [
        ("momentum", "lean"),
        ("AdamW", "scalar"),
        pytest.param("momentum", "scalar", marks=pytest.mark.slow),
        pytest.param("AdamW", "lean", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_goes_on_to_the_last_bit(optimizer, form, tmp_path):
    """Everything new but the file: before the share is known, and twice after; with dropout,
    statistics, a shuffled loader, accumulated and clipped gradients.
    """
    calls, accumulate = 44, 2

    def start(seed):
        model = network(0.2)
        made = OPTIMIZERS[optimizer](model.parameters())
        loader = DataLoader(TensorDataset(XV, YV), 12, shuffle=True)
        fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
        penalty = seht.HessianTrace(
            model, weight=FREE, total_steps=calls // accumulate, held_out=(loader, fn),
            optimizer=made, accumulate=accumulate, seed=seed,
        )  # fmt: skip
        return {"model": model, "optimizer": made, "penalty": penalty}

    def end(stops):
        parts = start(2)
        torch.manual_seed(5)
        for call in range(calls):
            if call in stops:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**states, "random": torch.get_rng_state()}, tmp_path / "run.pt")
                parts = start(3)
                saved = torch.load(tmp_path / "run.pt", weights_only=True)
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
                torch.set_rng_state(saved["random"])
            model, penalty = parts["model"], parts["penalty"]
            rows = slice(16 * (call % 3), 16 * (call % 3) + 16)
            closure = lambda model=model, rows=rows: F.cross_entropy(model(X[rows]), Y[rows])
            if form == "lean":
                penalty.backward(closure)
            else:
                penalty(closure).backward()
            if call % accumulate:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                parts["optimizer"].step()
                model.zero_grad()
        return penalty.path, copy.deepcopy(model.state_dict())

    whole, resumed = end(()), end((6, 22, 34))
    assert whole[0] == resumed[0] and len(set(whole[0].weights)) > 2
    assert same(whole[1], resumed[1])


def test_one_look_a_step_with_accumulation():
    model = network()
    asked = []

    def held_out():
        asked.append(1)
        return held_out_loss(model)()

    penalty = seht.HessianTrace(
        model, weight="tuned", curvature="ggn", total_steps=12, accumulate=3
    )
    for _ in range(36):
        penalty(training_loss(model), held_out=held_out).backward()
    assert len(asked) == 12 - 8


def test_looks_are_rarer_in_a_long_training():
    asked = []
    model = network()

    def held_out():
        asked.append(1)
        return held_out_loss(model)()

    penalty = seht.HessianTrace(
        model, weight=seht.Tuning(interval=3), curvature="ggn", total_steps=30
    )
    for _ in range(30):
        penalty(training_loss(model), held_out=held_out)
    assert len(asked) == len([k for k in range(8, 30) if k % 3 == 0])
    for every in (1, 2, 3, 4):
        assert every * seht.Tuning().spacing(penalised=100_000, every=every) >= 8
    assert seht.Tuning().spacing(penalised=150, every=1) == 1


def without_checks(penalty):
    """No check of the step from now on: when it is due depends on the last bits of the others."""
    state = penalty.state_dict()
    penalty.load_state_dict({**state, "engine": {**state["engine"], "next_check": 10**9}})


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_look_runs_the_model_once_more(form):
    model, calls = network(0.0), []
    penalty = seht.HessianTrace(model, weight="tuned", total_steps=12, kappa=1e-3)
    trained(model, penalty, 10, form)
    without_checks(penalty)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    trained(model, penalty, 1, form)
    looked = len(calls)
    fixed = seht.HessianTrace(model, weight=1e-3, curvature="ggn", kappa=1e-3)
    for _ in range(10):
        trained(model, fixed, 1, form, held_out=False)
    without_checks(fixed)
    calls.clear()
    trained(model, fixed, 1, form, held_out=False)
    assert looked == len(calls) + 1


@pytest.mark.parametrize(
    "options",
    [{"start": 0.0}, {"home": 9.0}, {"interval": 0}, {"travel": float("nan")}, {"gap": -0.1}],
)
def test_bad_tunings(options):
    with pytest.raises(ValueError):
        seht.Tuning(**options)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("probes", [1, 2])
def test_the_lean_form_finds_the_same_weight(curvature, probes):
    """It keeps the gradients of loss and trace apart, where the other has their graph."""
    found = []
    for form in ("scalar", "lean"):
        model = network(0.0).double()
        penalty = seht.HessianTrace(
            model, weight=FREE, curvature=curvature, total_steps=20, seed=4, probes=probes
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        closure = lambda: F.cross_entropy(model(X.double()), Y)
        more = {"held_out": lambda: F.cross_entropy(model(XV.double()), YV)}
        for _ in range(20):
            optimizer.zero_grad()
            if form == "scalar":
                penalty(closure, **more).backward()
            else:
                penalty.backward(closure, **more)
            optimizer.step()
        found.append((penalty.path, copy.deepcopy(model.state_dict())))
    assert found[0][0].weights == pytest.approx(found[1][0].weights, rel=1e-4)
    for name, a in found[0][1].items():
        torch.testing.assert_close(a, found[1][1][name], rtol=1e-4, atol=1e-6)


def tuned_path(model, wrap=lambda model: model, form="scalar", around=None, scaler=None):
    """The path of a short training, with the model called through a wrapper."""
    called = wrap(model)
    penalty = seht.HessianTrace(model, weight=FREE, curvature="ggn", total_steps=16, seed=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss(x, y):
        with around() if around else contextlib.nullcontext():
            return F.cross_entropy(called(x), y)

    more = {"held_out": lambda: loss(XV, YV)}
    for _ in range(16):
        optimizer.zero_grad()
        if form == "scalar":
            total = penalty(lambda: loss(X, Y), **more)
            (total if scaler is None else scaler.scale(total)).backward()
        else:
            penalty.backward(lambda: loss(X, Y), scaler=scaler, **more)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return penalty.path.weights


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_autocast_and_a_scaler(form):
    """The passes of a penalised step, this one among them, are in full precision."""
    plain = tuned_path(network(0.0), form=form)
    around = lambda: torch.autocast("cpu", torch.bfloat16)
    found = tuned_path(
        network(0.0), form=form, around=around, scaler=torch.amp.GradScaler("cpu", init_scale=8.0)
    )
    assert found == pytest.approx(plain, rel=0.1) and len(set(found)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model(form, backend):
    torch._dynamo.reset()
    try:
        wrap = lambda model: torch.compile(model, backend=backend)
        found = tuned_path(network(0.0), wrap, form=form)
    finally:
        torch._dynamo.reset()
    assert found == pytest.approx(tuned_path(network(0.0), form=form), rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "seht-s"},
        {"estimator": "seht-d", "prob": 0.5, "layer_prob": 0.5},
        {"elsewhere": True},
    ],
)
def test_every_estimator_finds_the_same_weight_in_both_forms(options):
    options = dict(options)
    elsewhere, found = options.pop("elsewhere", False), []
    for form in ("scalar", "lean"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
        penalty = seht.HessianTrace(
            model, weight=FREE, curvature="ggn", total_steps=20, seed=4, **options
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        closure = lambda: F.cross_entropy(model(X.double()), Y)
        more = {"held_out": lambda: F.cross_entropy(model(XV.double()), YV)}
        if elsewhere:
            more["on"] = lambda: F.cross_entropy(model(X[:16].double()), Y[:16])
        for _ in range(20):
            optimizer.zero_grad()
            if form == "scalar":
                penalty(closure, **more).backward()
            else:
                penalty.backward(closure, **more)
            optimizer.step()
        found.append(penalty.path.weights)
    assert len(set(found[0])) > 2 and found[0] == pytest.approx(found[1], rel=1e-4)
