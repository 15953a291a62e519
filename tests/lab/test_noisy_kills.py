"""Wrong labels, a search, a tuned weight and its path gone again: killed, in processes, on Ray."""

import importlib.util

import pytest
from small import FEW, digits, options, outcome, rows, start, train
from stops import end, killed_and_continued, stopped_and_resumed

TUNED = "seht-h(weight=tuned,warmup=1,every=1)"
LONGER = {**FEW, "epochs": "8"}  # a path has to begin
METHODS = f"weight-decay(weight=1e-3|1e-2),{TUNED},weight-decay(weight=best)+ema(decay=0.9)"
CALL = [
    *("compare", "digits-noisy", "--methods", METHODS, "--grid", "--refit", "--curve", "true"),
    *("--seeds", "1", "--save-every", "0", "--no-cost", *options(LONGER)),
]
ROWS = (2 + 1 + 3) * int(LONGER["epochs"])
"""Of two candidates, a training with held-out examples and three rows."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The comparison as it should be."""
    out = tmp_path_factory.mktemp("undisturbed")
    end(start([*CALL, "--out", out / "c"], out / "log"), out / "log")
    expected = outcome(out / "c")
    assert len(expected["table.csv"]) == 3 and rows(out / "c") == ROWS
    assert len(expected["grid.json"]["candidates"]) == 2
    # A tuned weight takes a training before the one that judges; the third row has the first's.
    assert list(expected["grid.json"]["runs"].values()) == [2, 1, 2]
    return expected


def test_a_killed_comparison_ends_with_the_same_table(tmp_path, undisturbed):
    killed_and_continued(CALL, tmp_path, undisturbed, ROWS, 1, seed=1)


@pytest.mark.slow
def test_ten_kills(tmp_path, undisturbed):
    killed_and_continued(CALL, tmp_path, undisturbed, ROWS, 10, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [["--jobs", "2"], ["--engine", "ray"]], ids=lambda e: e[-1])
def test_it_is_the_same_everywhere(engine, tmp_path, undisturbed, monkeypatch):
    if "ray" in engine and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    log = tmp_path / "log"
    end(start([*CALL, *engine, "--out", tmp_path / "c"], log), log)
    assert outcome(tmp_path / "c") == undisturbed


@pytest.mark.parametrize("method", [TUNED, "seht-h(share=2.0,warmup=1)"])
def test_a_stopped_run_ends_as_if_it_had_not_been(method, tmp_path):
    made = digits(**LONGER, **{"data.noise": "0.4", "data.within": "true"})
    train(made, method, 0, tmp_path / "a")
    stopped_and_resumed(made, method, tmp_path / "b", 1, 11)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
