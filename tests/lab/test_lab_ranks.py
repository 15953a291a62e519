"""Several ranks train one model: the same examples, the same figures, and on after a kill -9."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from elastic import end, launch
from small import FEW, digits, options, outcome, pydocs, train

from seht.lab.methods import METHODS, parse
from seht.lab.methods.base import Batch
from seht.lab.ranks import FabricRanks, join
from seht.lab.records import RunError


def losses(directory):
    with open(directory / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [float(row[name]) for row in rows for name in ("train_loss", "valid_loss")]


class Place:
    """Of a rank among others that are not there."""

    def __init__(self, rank, count):
        self.global_rank, self.world_size = rank, count


@pytest.mark.parametrize("shape", [(10, 3), (7, 3), (2, 3), (1, 2)])
def test_shares_are_the_batch_and_weights_make_its_mean(shape):
    whole, count = shape
    values = torch.randn(whole, dtype=torch.float64)
    images = Batch(values.view(-1, 1, 1, 1), torch.arange(whole), other=torch.arange(whole))
    text = Batch(values.repeat(4, 1), torch.arange(whole).repeat(4, 1))
    for batch in (images, text):
        parts = [FabricRanks(Place(rank, count)).share(batch) for rank in range(count)]
        mean = sum(weight * part.x.mean() for part, weight in parts) / count
        assert float(mean) == pytest.approx(float(values.mean()))
        kept = torch.cat([part.y[-1:].flatten() if part.y.dim() > 1 else part.y
                          for part, weight in parts if weight])  # fmt: skip
        assert kept.tolist() == list(range(whole))
        assert all(part.y.numel() for part, _ in parts)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_it_had_not_been(rank, tmp_path):
    """kill -9 in mid-epoch; the agent starts both anew, and they go on from the checkpoint."""
    recipe = digits(**{"epochs": "8", "data.size": "110", "spectrum": "0"})
    method, out = "dropout+seht-h(warmup=0)", tmp_path / "b"
    end(launch(recipe, method, out=tmp_path / "a"), tmp_path / "a")
    process = launch(recipe, method, out=out, restarts=1)
    try:
        _wait(lambda: _within_an_epoch(out), process, out)
        os.kill(int((tmp_path / f"b.pid-{rank}").read_text()), signal.SIGKILL)
    finally:
        end(process, out)
    said = Path(f"{out}.log").read_text()
    assert "goes on at step" in said and said.count("epoch 8/8") == 1
    assert outcome(out) == outcome(tmp_path / "a")
    a, b = (torch.load(p / "model.pt", weights_only=True) for p in (tmp_path / "a", out))
    assert all(torch.equal(a[name], b[name]) for name in a)


def _within_an_epoch(out):
    """Two epochs are done, and a step of the next is saved."""
    saved, metrics = out / "checkpoint.pt", out / "metrics.csv"
    return len(losses(out)) >= 4 and saved.stat().st_mtime_ns > metrics.stat().st_mtime_ns


def _wait(ready, process, out, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.exitcode is None:
        try:
            if ready():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.005)
    raise AssertionError(Path(f"{out}.log").read_text())


def test_two_ranks_are_one_run(tmp_path):
    """The batch of 25 in shares of 12 and 13, the last one of 10."""
    recipe = digits(**{"data.size": "110", "optim.lr": "0.2", "spectrum": "0"})
    method = "label-smoothing"
    end(launch(recipe, method, out=tmp_path / "two"), tmp_path / "two")
    train(recipe, method, 0, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    with pytest.raises(RunError, match="ranks is 2 there, 1 here"):
        train(recipe, method, 0, tmp_path / "two")


@pytest.mark.slow
def test_text_in_shares_of_its_streams(tmp_path):
    recipe = pydocs(**{"batch": "5", "model.dropout": "0", "spectrum": "0"})
    end(launch(recipe, "none", out=tmp_path / "two"), tmp_path / "two")
    train(recipe, "none", 0, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.slow
def test_every_method_trains(tmp_path):
    methods = [
        f"{name}(warmup=0)" if "warmup" in parse.options(name) else name
        for name, method in METHODS.items()
        if "image" in method.tasks
    ]
    end(launch(digits(epochs="2"), *methods, out=tmp_path / "all"), tmp_path / "all")
    for method in methods:
        train(digits(epochs="2"), method, 0, tmp_path / "one" / method)
        one, two = (losses(tmp_path / which / method) for which in ("one", "all"))
        assert two == pytest.approx(one, rel=0.2), method


COMMAND = ["-m", "seht", "train", "digits", "--device", "cpu", "--method", "none", *options(FEW)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "fabric"])
def test_from_the_command_line(how, tmp_path):
    arguments = [*TORCHRUN, *COMMAND] if how == "torchrun" else [*COMMAND, "--devices", "2"]
    done = subprocess.run(
        [sys.executable, *arguments, "--out", str(tmp_path / "two")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 3/3") == 1 and done.stdout.count("\ntrace ") == 1
    train(digits(), "none", 0, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
def test_a_mistake_is_said_once(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = subprocess.run(
        [sys.executable, *TORCHRUN, *COMMAND, "--out", str(tmp_path / "file" / "run")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("seht: error: cannot write") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_devices_and_torchrun_must_agree(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="leave --devices out"):
        join("cpu", 3, "32-true")
