"""ASAM, the average of weights and early stopping: arithmetic, and what a run keeps of them."""

import csv

import pytest
import torch
from small import digits, outcome, timeless, train
from stops import stopped_and_resumed
from torch import nn
from training import IMAGE, RECIPES, Trainer

from seht.lab.evaluate import evaluate
from seht.lab.methods.optimizers import sharpness_aware
from seht.lab.methods.parse import parse
from seht.lab.methods.weights import since_best
from seht.lab.training import Training

# --- ASAM -------------------------------------------------------------------------------------


def test_asam_is_sam_in_units_of_the_weights():
    """One step of plain SGD in float64, written out."""
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.bias[0] = 0.0  # a weight at 0 is not moved
    target = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = lambda w, b: (x @ w.T + b - target).pow(4).mean()
    start = [p.detach().clone().requires_grad_() for p in model.parameters()]
    gradients = torch.autograd.grad(loss(*start), start)
    norm = sum((p.abs() * g).square().sum() for p, g in zip(start, gradients, strict=True)).sqrt()
    moved = [
        (p + 0.3 * p.square() * g / norm).detach().requires_grad_()
        for p, g in zip(start, gradients, strict=True)
    ]
    there = torch.autograd.grad(loss(*moved), moved)
    wanted = [p.detach() - 0.1 * g for p, g in zip(start, there, strict=True)]
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = sharpness_aware(sgd, model, rho=0.3, adaptive=True)

    def closure():
        optimizer.zero_grad()
        loss(model.weight, model.bias).backward()

    closure()
    optimizer.step(closure)
    for ours, theirs in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(
            ours.detach(), theirs, rtol=1e-6, atol=1e-9
        )  # its norm is in float32


def test_asam_is_adaptive_sam():
    asam, sam = Trainer("asam(rho=0.4)", IMAGE), Trainer("sam(rho=0.4,adaptive=true)", IMAGE)
    asam.train(3), sam.train(3)
    ours, theirs = asam.weights(), sam.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ValueError, match="contradict each other"):
        parse("asam+sam")


# --- the average ------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["image", "text"])
def test_the_average_of_every_step(task):
    """Against the sum over the weights of all steps; training itself is the plain one."""
    ours, plain = Trainer("ema(decay=0.5)", RECIPES[task]), Trainer("weight-decay", RECIPES[task])
    wanted = plain.weights()
    for step in range(1, 13):
        ours.train(1), plain.train(1)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in plain.weights().items():
            moves = value.is_floating_point()
            wanted[name] = decay * wanted[name] + (1 - decay) * value if moves else value
    found = ours.weights()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
    raw = dict(ours.model.state_dict())  # outside, the model has the trained weights again
    assert all(torch.equal(raw[name], value) for name, value in plain.weights().items())


def test_a_run_is_judged_by_the_average(tmp_path):
    recipe = digits(epochs="4")
    result = train(recipe, "ema(decay=0.9)", 0, tmp_path / "ema")
    plain = train(recipe, "weight-decay", 0, tmp_path / "plain")
    assert result.metrics["last"]["test_loss"] != plain.metrics["last"]["test_loss"]
    training = Training(recipe, parse("weight-decay"), 0, device="cpu")
    training.bare.load_state_dict(torch.load(tmp_path / "ema" / "model.pt", weights_only=True))
    found = evaluate(training.own, training.data.eval_batches("test"), "image")
    assert result.metrics["last"]["test_loss"] == pytest.approx(found["loss"], rel=1e-6)
    with (
        open(tmp_path / "ema" / "metrics.csv") as ours,
        open(tmp_path / "plain" / "metrics.csv") as theirs,
    ):
        pairs = list(zip(csv.DictReader(ours), csv.DictReader(theirs), strict=True))
    assert all(a["train_loss"] == b["train_loss"] for a, b in pairs)
    assert all(a["valid_loss"] != b["valid_loss"] for a, b in pairs)


# --- early stopping ---------------------------------------------------------------------------

TRAINING = {"epochs": "8", "optim.lr": "0.3", "data.noise": "0.6", "robustness": "false"}


def test_a_run_ends_with_its_best_epoch(tmp_path):
    """Of labels that are mostly wrong: the last epoch is not the best here."""
    recipe = digits(**TRAINING)
    plain = train(recipe, "weight-decay", 0, tmp_path / "plain")
    ours = train(recipe, "early-stopping", 0, tmp_path / "ours")
    best = plain.metrics["best"]
    assert best["epoch"] < 8 and best["test_loss"] != plain.metrics["last"]["test_loss"]
    assert ours.metrics["best"] == best and ours.epochs == 8
    assert ours.metrics["last"] == {k: v for k, v in best.items() if k != "epoch"}
    assert ours.weight_norm != plain.weight_norm  # flatness is that of the chosen weights too
    weights = torch.load(tmp_path / "ours" / "model.pt", weights_only=True)
    norm = sum(w.double().square().sum().item() for w in weights.values()) ** 0.5
    assert ours.weight_norm == pytest.approx(norm)


def test_patience(tmp_path):
    recipe = digits(**TRAINING)
    result = train(recipe, "early-stopping(patience=2)", 0, tmp_path / "a")
    assert result.epochs == result.metrics["best"]["epoch"] + 2 < 8
    resumed = stopped_and_resumed(
        recipe, "early-stopping(patience=2)", tmp_path / "b", result.steps - 1
    )
    assert timeless(vars(resumed)) == timeless(vars(result))
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_the_first_of_equal_epochs_counts():
    rows = [{"valid_top1": top1, "valid_loss": 1.0} for top1 in (50.0, 60.0, 60.0, 55.0)]
    assert since_best(rows) == 2 and since_best([]) == 0
    assert since_best([{"valid_loss": loss} for loss in (3.0, 2.0, 2.5)]) == 1


def test_there_must_be_something_to_choose_on():
    method = parse("early-stopping")
    with pytest.raises(ValueError, match=r"for example --data\.validation 60"):
        Training(digits(**{"data.validation": "0"}), method, 0, device="cpu")
