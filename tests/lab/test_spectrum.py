"""Eigenvalues and stability at the end of a run: right, bounded, and missing from older records."""

import json
import math

import pytest
import torch
from small import digits, outcome, pydocs, train

from seht import measure
from seht.lab import report
from seht.lab.compare import Comparison, Entry, compare
from seht.lab.ending import spectrum
from seht.lab.measured import subjects
from seht.lab.methods.parse import parse
from seht.lab.recipes import from_dict, identity, override
from seht.lab.training import Training


def quiet(line):
    pass


def test_they_are_those_of_the_trained_weights(tmp_path):
    recipe = digits(**{"epochs": "6", "spectrum": "80", "data.size": "50"})
    result = train(recipe, "none", 0, tmp_path / "run")
    (subject,) = subjects([str(tmp_path / "run")], "train")
    subject.model.eval()
    exact = measure.stability(subject.model, subject.loss_fn, subject.data)
    found = result.eigenvalues
    assert found["converged"] and found["samples"] == 50 and found["products"] <= 82
    for end in ("largest", "smallest"):
        (value, *_) = getattr(exact.eigenvalues, end)
        assert found[end] == pytest.approx(value, rel=0.02)
        assert found[f"{end}_residual"] <= 0.06 * abs(value)
    assert result.stability["verdict"] == exact.verdict
    assert result.stability["equilibrium"] == exact.equilibrium
    assert result.stability["gradient_norm"] == pytest.approx(exact.gradient_norm, rel=1e-4)
    assert result.stability["largest_rate"] == pytest.approx(2 / found["largest"])


def test_few_products_give_bounds_and_none_nothing(tmp_path):
    few = train(digits(spectrum="5"), "none", 0, tmp_path / "few")
    assert few.eigenvalues["converged"] is False and few.eigenvalues["products"] == 7
    many = train(digits(spectrum="80"), "none", 0, tmp_path / "many")
    assert few.eigenvalues["smallest"] > many.eigenvalues["smallest"]
    assert few.eigenvalues["largest"] <= many.eigenvalues["largest"] * (1 + 1e-6)
    none = train(digits(spectrum="0"), "none", 0, tmp_path / "none")
    assert none.eigenvalues is None and none.stability is None and none.trace is not None
    search = train(digits(), "none", 0, tmp_path / "search", test=False)
    assert search.eigenvalues is None


def test_it_changes_nothing_else(tmp_path):
    """The global random state and the weights: what comes after the measurement is the same."""
    results = [train(digits(spectrum=n), "dropout", 0, tmp_path / n) for n in ("0", "20")]
    assert results[0].metrics == results[1].metrics
    a, b = (torch.load(tmp_path / n / "model.pt", weights_only=True) for n in ("0", "20"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_of_a_language_model(tmp_path):
    result = train(pydocs(epochs="1"), "none", 0, tmp_path)
    found = result.eigenvalues
    assert found["largest"] > found["smallest"] and found["products"] <= 42
    assert result.stability["verdict"] in ("unstable", "marginal", "undecided")


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_weights_in_half_precision_are_measured_in_float(precision, tmp_path):
    result = train(digits(epochs="1", precision=precision), "none", 0, tmp_path)
    assert result.done and result.trace["estimate"] > 0
    assert result.eigenvalues["largest"] > 0
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {w.dtype for w in weights.values()} == {dtype}


def test_a_measurement_that_cannot_be_made_says_why():
    training = Training(digits(), parse("none"), 0, device="cpu")
    with torch.no_grad():
        next(training.bare.parameters()).fill_(math.nan)
    found = spectrum(training.bare, training.data.eval_batches("train", 50), 0, 10)
    assert found["stability"]["verdict"] == "undecided" and "eigenvalues" not in found
    assert "not finite" in found["stability"]["reason"]


def test_records_from_before_are_reported_and_go_on(tmp_path):
    """Neither the recipe's field nor the result's were there."""
    recipe, out, said = digits(epochs="1"), tmp_path / "c", []
    entries = tuple(Entry(parse(name), recipe) for name in ("none", "mixup"))
    compare(Comparison(recipe, entries, (0,), out), costs=False, say=quiet)
    for file in out.rglob("*.json"):
        content = json.loads(file.read_text())
        for key in ("eigenvalues", "stability"):
            content.pop(key, None)
        assert "spectrum" not in content.get("recipe", {})
        file.write_text(json.dumps(content))
    report.write(out)
    assert "eigenvalue" not in (out / "table.md").read_text()
    files = compare(Comparison(recipe, entries, (0, 1), out), costs=False, say=said.append)
    assert said[0] == "2 of 4 runs are done already"
    assert "largest eigenvalue" in files["table.md"].read_text()
    before = outcome(out)
    compare(Comparison(recipe, entries, (0, 1), out), costs=False, say=quiet)
    assert outcome(out) == before


def test_the_field_is_part_of_a_run_unless_it_has_its_default():
    recipe = digits()
    assert "spectrum" not in identity(recipe) and from_dict(identity(recipe)) == recipe
    other = override(recipe, {"spectrum": "7"})
    assert identity(other)["spectrum"] == 7 and from_dict(identity(other)) == other
