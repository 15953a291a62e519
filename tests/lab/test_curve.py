"""The test set's curve: written where it is asked for, and seen by nobody who chooses."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from small import digits, outcome, timeless, train
from stops import stopped_and_resumed

from seht.lab.compare import Comparison, Entry, compare
from seht.lab.data.examples import Examples
from seht.lab.evaluate import evaluate
from seht.lab.methods.parse import parse
from seht.lab.recipes import identity
from seht.lab.search import expand
from seht.lab.training import Training

CURVE = {"curve": "true"}
NOISY = {"data.noise": "0.4", "data.within": "true"}
# Long enough that held-out examples move a tuned weight.
LONGER = {**NOISY, **CURVE, "epochs": "30", "optim.lr": "0.2"}
TUNED = "seht-h(weight=tuned,warmup=1,every=1)"


def table(directory):
    with open(directory / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_the_last_point_is_the_result(tmp_path):
    result = train(digits(**CURVE), "mixup", 0, tmp_path)
    found = [float(row["test_top1"]) for row in table(tmp_path)]
    assert len(found) == 3 and found[-1] == result.metrics["last"]["test_top1"]
    training = Training(digits(), parse("mixup"), 0, device="cpu")
    training.bare.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    by_hand = evaluate(training.bare, training.data.eval_batches("test"), "image")["top1"]
    assert found[-1] == by_hand


@pytest.mark.parametrize("method", ["early-stopping(patience=1)", "seht-h(weight=tuned,warmup=0)"])
def test_it_changes_nothing_else(method, tmp_path):
    plain = train(digits(**NOISY), method, 0, tmp_path / "a")
    drawn = train(digits(**NOISY, **CURVE), method, 0, tmp_path / "b")
    assert timeless(vars(plain)) == timeless(vars(drawn))
    assert "test_top1" not in table(tmp_path / "a")[0]
    recorded = json.loads((tmp_path / "b" / "config.json").read_text())["recipe"]
    assert recorded["curve"] is True and "curve" not in identity(digits())


def test_a_search_has_none(tmp_path):
    train(digits(**CURVE), "none", 0, tmp_path, test=False)
    assert "test_top1" not in table(tmp_path)[0]


def test_a_stopped_run_keeps_its_curve(tmp_path):
    train(digits(**CURVE), "none", 0, tmp_path / "a")
    stopped_and_resumed(digits(**CURVE), "none", tmp_path / "b", 6)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


@pytest.fixture
def turned(monkeypatch):
    """From now on the test set's labels are in another order."""
    inside = Examples.__init__

    def other(self, source, *arguments):
        inside(self, replace(source, y_test=source.y_test.flip(0)), *arguments)

    return lambda: monkeypatch.setattr(Examples, "__init__", other)


@pytest.mark.parametrize("method", ["early-stopping", TUNED, "ema"])
def test_no_choice_depends_on_the_test_labels(method, tmp_path, turned):
    """With other test labels everything but the test figures is the same to the last digit."""
    real = train(digits(**LONGER), method, 0, tmp_path / "a")
    turned()
    other = train(digits(**LONGER), method, 0, tmp_path / "b")
    a, b = (torch.load(tmp_path / run / "model.pt", weights_only=True) for run in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert real.metrics["last"]["test_loss"] != other.metrics["last"]["test_loss"]
    for which, figures in real.metrics.items():  # the validation figures too, that choices go by
        ours, theirs = (
            {name: value for name, value in found.items() if not name.startswith("test")}
            for found in (figures, other.metrics[which])
        )
        assert ours == theirs and {"valid_loss", "valid_top1"} <= ours.keys()
    assert real.paths == other.paths and bool(real.paths) == (method == TUNED)


def test_no_search_depends_on_the_test_labels(tmp_path, turned):
    """Also with the paths of tuned weights, gone again with the validation examples."""
    texts = ["weight-decay(weight=1e-3|1e-2)", TUNED]
    made = digits(**LONGER)

    def searched(name):
        rows = [[Entry(parse(one), made) for one in expand(text)] for text in texts]
        firsts = tuple(row[0] for row in rows)
        asked = Comparison(made, firsts, (0,), tmp_path / name, refit=True)
        compare(asked, grid=rows, costs=False, say=lambda line: None)
        folders = sorted((tmp_path / name).glob("runs/*/*"))
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        weights = [torch.load(folder / "model.pt", weights_only=True) for folder in folders]
        return json.loads((tmp_path / name / "grid.json").read_text()), weights, results

    grid, weights, results = searched("a")
    turned()
    other_grid, other_weights, other_results = searched("b")
    assert grid == other_grid and len(grid["candidates"]) == 2 and len(weights) == 2
    for one, other in zip(weights, other_weights, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for one, other in zip(results, other_results, strict=True):
        assert one["metrics"]["last"]["test_loss"] != other["metrics"]["last"]["test_loss"]
