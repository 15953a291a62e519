"""What a command has not written itself it does not write over."""

import json

import pytest
from small import FEW, options

from seht.commands.files import check_outputs

ONE = options({**FEW, "epochs": "1"})
COMPARE = ["compare", "digits", "--methods", "weight-decay", "--seeds", "1", "--no-cost", *ONE]
TRAIN = ["train", "digits", *ONE]
MINE = """
import torch

def model():
    return torch.nn.Linear(4, 3)

def data():
    return torch.randn(8, 4), torch.arange(8) % 3
"""
MEASURE = ["measure", "--model", "placed_mine:model", "--data", "placed_mine:data"]


def contents(directory):
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@pytest.mark.parametrize("command", [COMPARE, [*COMPARE, "--grid"], TRAIN], ids=lambda c: c[0])
@pytest.mark.parametrize(
    "name", ["table.md", "notes.txt", "config.json", "comparison.json", "runs/a/seed-0/config.json"]
)
def test_a_directory_of_somebody_else_is_refused(run, tmp_path, command, name):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"model_type": "llama"}))
    before = contents(tmp_path)
    code, out, err = run(*command, "--out", "mine")
    assert code == 2 and out == ""
    assert err.startswith("seht: error: mine ") and err.count("\n") == 1 and "--out" in err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", [COMPARE, TRAIN], ids=lambda c: c[0])
def test_our_own_is_gone_on_with(run, tmp_path, command):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".gitkeep").write_text("")
    (tmp_path / "out" / "result.json.part").write_text("killed")
    assert run(*command, "--out", "out")[0] == 0
    before = contents(tmp_path / "out")
    assert run(*command, "--out", "out")[0] == 0
    assert contents(tmp_path / "out").keys() == before.keys()


def test_a_comparison_that_has_lost_its_file_is_still_ours(run, tmp_path):
    assert run(*COMPARE, "--out", "out")[0] == 0
    (tmp_path / "out" / "comparison.json").unlink()
    code, out, _ = run(*COMPARE, "--out", "out")
    assert code == 0 and "1 of 1 runs are done already" in out


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_of_somebody_else_is_refused(run, tmp_path, option, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "placed_mine.py").write_text(MINE)
    (tmp_path / "file").write_text("a thesis")
    code, out, err = run(*MEASURE, "--what", "trace", option, "file")
    assert code == 2 and out == ""
    assert "was not written by seht" in err and err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "a thesis"
    for _ in range(2):  # ours is written anew
        assert run(*MEASURE, "--what", "trace", option, "other")[0] == 0
        assert (tmp_path / "other").stat().st_size


@pytest.mark.parametrize("option", ["--json", "--out", "--plot"])
def test_files_of_the_bench(run, tmp_path, option):
    (tmp_path / "file.png").write_text("a thesis")
    code, out, err = run("bench", "--fast", option, "file.png")
    assert code == 2 and out == "" and "was not written by seht" in err
    assert (tmp_path / "file.png").read_text() == "a thesis"


def test_places_that_are_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="not an ordinary file"):
        check_outputs("/dev/null")  # for root it would be gone
    with pytest.raises(ValueError, match="it is a directory"):
        check_outputs(str(tmp_path))
    with pytest.raises(ValueError, match="no such directory"):
        check_outputs("nowhere/file")
    with pytest.raises(ValueError, match="two names"):
        check_outputs("a", str(tmp_path / "a"))
    check_outputs("-", None, "-")


def test_a_picture_of_ours_is_known(tmp_path):
    from seht.lab.bench import plot
    from seht.lab.bench.results import CaseResult, RowResult

    row = RowResult("h/scalar", "SEHT-H", "hessian", 3.0, ratio=3.0, variance=1.0)
    for name in ("a.png", "b.svg", "c.pdf"):
        plot.draw([CaseResult("mlp", "MLP", {}, [row])], str(tmp_path / name))
        check_outputs(str(tmp_path / name))
