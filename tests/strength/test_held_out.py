"""weight="tuned": what it asks of held-out data, what it leaves alone, what it refuses."""

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F
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


def test_a_resumed_run_goes_on_to_the_last_bit():
    loader = [(XV[:16], YV[:16]), (XV[16:], YV[16:])]
    fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    options = {"weight": "tuned", "curvature": "ggn", "total_steps": 40, "held_out": (loader, fn)}
    ends = []
    for stops in ((), (4, 21)):
        model = network(0.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        penalty = seht.HessianTrace(model, **options, seed=2)
        for step in range(40):
            if step in stops:
                state = penalty.state_dict()
                penalty = seht.HessianTrace(model, **options, seed=3)
                penalty.load_state_dict(state)
            optimizer.zero_grad()
            penalty(training_loss(model)).backward()
            optimizer.step()
        ends.append((penalty.path, copy.deepcopy(model.state_dict())))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][k], ends[1][1][k]) for k in ends[0][1])


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


def test_beyond_its_length_the_weight_stays_with_one_warning():
    model = network()
    penalty = seht.HessianTrace(model, weight="tuned", curvature="ggn", total_steps=12)
    trained(model, penalty, 12)
    with pytest.warns(seht.PenaltyWarning, match="beyond total_steps=12") as found:
        trained(model, penalty, 6)
    assert len([w for w in found if "beyond" in str(w.message)]) == 1
    assert penalty.last.weight == pytest.approx(penalty.path.weights[-1])


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


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_look_runs_the_model_once_more(form):
    model, calls = network(0.0), []
    penalty = seht.HessianTrace(model, weight="tuned", total_steps=12, kappa=1e-3)
    trained(model, penalty, 10, form)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    trained(model, penalty, 1, form)
    looked = len(calls)
    fixed = seht.HessianTrace(model, weight=1e-3, curvature="ggn", kappa=1e-3)
    for _ in range(10):
        trained(model, fixed, 1, form, held_out=False)
    calls.clear()
    trained(model, fixed, 1, form, held_out=False)
    assert looked == len(calls) + 1


def refused(penalty, model, **more):
    """The call fails, and nothing is left of it."""
    weights = copy.deepcopy(model.state_dict())
    random, state = torch.get_rng_state(), copy.deepcopy(penalty.state_dict())
    with pytest.raises((ValueError, TypeError, RuntimeError)) as failure:
        penalty(training_loss(model), **more)
    assert all(torch.equal(a, weights[k]) for k, a in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert str(penalty.state_dict()) == str(state)
    assert all(p.grad is None for p in model.parameters())
    assert "\n" not in str(failure.value)
    return str(failure.value)


def started():
    model = network()
    penalty = seht.HessianTrace(model, weight="tuned", curvature="ggn", total_steps=40)
    for _ in range(8):
        penalty(training_loss(model))  # the start is measured without held-out data
    return penalty, model


@pytest.mark.parametrize(
    "held_out, said",
    [
        (lambda model: None, "needs held-out data"),
        (lambda model: lambda: F.cross_entropy(model(XV), YV) * math.nan, "not finite"),
        (lambda model: lambda: F.cross_entropy(model(XV), YV) + math.inf, "held-out loss is not"),
        (lambda model: lambda: nn.Linear(2, 2)(torch.ones(2, 2)).sum(), "none of the probed"),
        (lambda model: lambda: F.cross_entropy(model(XV), YV).item(), "scalar tensor"),
        (lambda model: XV, "held_out must be a function"),
        (lambda model: model, "held_out must be a function"),
        (lambda model: (iter([]), lambda m, b: m(b).sum()), "run out"),
    ],
)
def test_held_out_data_that_are_none(held_out, said):
    penalty, model = started()
    assert said in refused(penalty, model, held_out=held_out(model))


def test_the_training_closure_itself_is_refused():
    penalty, model = started()
    closure = training_loss(model)
    with pytest.raises(ValueError, match="the training closure itself"):
        penalty(closure, held_out=closure)


def test_held_out_beside_a_given_weight_is_refused():
    model = network()
    penalty = seht.HessianTrace(model, weight=1e-3)
    assert "weight='tuned'" in refused(penalty, model, held_out=held_out_loss(model))
    with pytest.raises(ValueError, match="weight='tuned'"):
        seht.HessianTrace(model, weight=1e-3, held_out=held_out_loss(model))


def test_a_state_of_another_mode_is_refused():
    model = network()
    states = {
        "given": seht.HessianTrace(model, weight=1e-3).state_dict(),
        "share": seht.HessianTrace(model, share=0.1).state_dict(),
        "tuned": seht.HessianTrace(model, weight="tuned").state_dict(),
    }
    for kind, penalty in {
        "given": seht.HessianTrace(model, weight=1e-3),
        "share": seht.HessianTrace(model, share=0.1),
        "tuned": seht.HessianTrace(model, weight="tuned"),
    }.items():
        for other, state in states.items():
            if other == kind:
                penalty.load_state_dict(state)
            else:
                with pytest.raises(ValueError, match=f"belongs to a {other} weight"):
                    penalty.load_state_dict(state)


def test_other_words_for_a_weight_are_refused():
    with pytest.raises(ValueError, match="'tuned'"):
        seht.HessianTrace(network(), weight="auto")


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
