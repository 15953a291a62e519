"""Weights tuned on the validation split, shares, and training again on all the examples."""

import json

import pytest

from seht import WeightPath, cli

SHORT = ["--epochs", "8", "--no-cost", "--data.size", "120", "--data.validation", "40"]


def compare(tmp_path, methods, *more, seeds=1):
    where = ["--out", str(tmp_path), "--seeds", str(seeds)]
    return cli.main(["compare", "digits-noisy", "--methods", methods, *SHORT, *where, *more])


def results(tmp_path, folder):
    files = sorted(tmp_path.glob(f"{folder}/*/seed-*/result.json"))
    return {file.parent.parent.name: json.loads(file.read_text()) for file in files}


def test_a_tuned_weight_is_found_and_its_path_gone_again(tmp_path, capsys):
    methods = "weight-decay,seht-h(weight=tuned,warmup=2,every=1),seht-h(share=2.0)"
    assert compare(tmp_path, methods, "--refit") == 0
    (found,) = results(tmp_path, "tuned").values()
    path = WeightPath.of(found["paths"]["seht-h"])
    assert len(path.weights) > 3 and "test_top1" not in found["metrics"]["last"]
    judged = results(tmp_path, "runs")
    assert len(judged) == 3 and all("test_top1" in r["metrics"]["last"] for r in judged.values())
    # 80 examples in batches of 50 are two steps an epoch; all 120 are three.
    assert found["steps"] == 16 and {r["steps"] for r in judged.values()} == {24}
    told = next(tmp_path.glob("runs/seht-h_weight=tuned*/seed-0/config.json"))
    assert WeightPath.of(json.loads(told.read_text())["paths"]["seht-h"]) == path
    assert "--seeds 1 --refit --" in (tmp_path / "table.md").read_text()  # to repeat it
    page = (tmp_path / "report.html").read_text()
    assert "40 % replaced at random" in page and "trained on too" in page
    assert "Tuned weight against epoch" in page
    before = (tmp_path / "table.csv").read_text()
    capsys.readouterr()
    assert compare(tmp_path, methods, "--refit") == 0  # nothing is run again
    assert "3 of 3 runs are done already" in capsys.readouterr().out
    assert (tmp_path / "table.csv").read_text() == before


def test_a_share_takes_the_place_of_the_recipes_weight(tmp_path):
    """digits-noisy sets a weight for seht-h; beside a share it would be one too many."""
    assert compare(tmp_path, "weight-decay,seht-h(share=0.5)") == 0
    assert all(r["status"] == "done" for r in results(tmp_path, "runs").values())


@pytest.mark.parametrize(
    "command, said",
    [
        (["--methods", "seht-h(weight=tuned)", "--data.validation", "0"], "--data.validation"),
        (["--methods", "seht-h(weight=tune)"], "'tuned'"),
        (["--methods", "seht-h(weight=best)"], "search with --grid"),
        (["--methods", "seht-h(weight=tuned,share=2)"], "not both"),
        (["--methods", "none", "--refit", "--data.validation", "0"], "needs a validation split"),
        (["--grid", "--data.validation", "0"], "--grid needs a validation split"),
        (["--grid", "--first-seed", "1000000"], "seeds from 1000000 on are those of the search"),
        (["--methods", "none,early-stopping", "--refit"], "leave one of the two out"),
        (
            ["--methods", "none", "--refit", "--optim.schedule", "plateau"],
            "choose another schedule",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, capsys, command, said):
    out = ["--out", str(tmp_path / "out"), "--no-cost", "--seeds", "1"]
    assert cli.main(["compare", "digits-noisy", *command, *out]) == 2
    printed, told = capsys.readouterr()
    assert said in told and "\n" not in told.strip() and not printed
    assert told.count("early-stopping") <= 1  # its name is said once
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["none", "seht-h(weight=tuned)"])
def test_text_has_its_validation_elsewhere(tmp_path, capsys, method):
    out = ["--out", str(tmp_path / "out"), "--no-cost", "--seeds", "1", "--methods", method]
    assert cli.main(["compare", "pydocs", "--refit", *out]) == 2
    assert "text of their own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # said before the first training


def test_a_directory_is_with_it_or_without(tmp_path, capsys):
    few = ("none", "--epochs", "1")
    assert compare(tmp_path, *few) == 0 and compare(tmp_path, *few, "--refit") == 2
    told = capsys.readouterr().err
    assert "holds a comparison without --refit; choose another" in told and "without it" in told


def test_a_training_too_short_for_a_path(tmp_path, capsys):
    methods = "seht-h(weight=tuned,warmup=2,every=1)"
    assert compare(tmp_path, methods, "--refit", "--epochs", "2") == 2
    told = capsys.readouterr().err.strip()
    assert "has not begun to move in 4 steps" in told and "\n" not in told


def test_a_failed_training_leaves_its_row_out_and_the_others_finish(tmp_path, capsys):
    methods = "weight-decay(weight=0),seht-h(weight=tuned,warmup=2,every=1)"
    assert compare(tmp_path, methods, "--refit", "--optim.lr", "1e30") == 0
    told = capsys.readouterr().out
    assert "left out: seht-h(" in told and "held-out examples failed: " in told
    assert list(results(tmp_path, "runs")) == ["weight-decay_weight=0.0"]  # failed, too
