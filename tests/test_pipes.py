"""A reader that leaves, a disk that is full: no traceback, and nothing when the process ends."""

import os
import subprocess
import sys
from pathlib import Path

import comparisons
import pytest

import seht

MINE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(200)]  # a table of layers that fills a pipe's buffer
    return nn.Sequential(*layers)

def data():
    return torch.randn(8, 3), torch.arange(8) % 3

def example():
    loss = nn.functional.cross_entropy
    return nn.Linear(3, 3), lambda net, batch: loss(net(batch[0]), batch[1]), data()
"""
COMMANDS = [
    ["--help"],
    ["--version"],
    ["train", "digits", "--help"],
    ["list"],
    ["check", "mine:example", "--json"],
    ["measure", "--model", "mine:model", "--data", "mine:data"],
    ["measure", "--model", "mine:model", "--data", "mine:data", "--json", "-"],
    ["report", "compared"],
    ["train", "digits", "--epochs", "2", "--data.size", "100", "--model.width", "4"],
]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    comparisons.comparison(tmp_path / "compared", seeds=1)
    return tmp_path


def command(arguments):
    return [sys.executable, "-m", "seht", *arguments]


def surroundings():
    return {**os.environ, "PYTHONPATH": str(Path(seht.__file__).parents[1])}


def gone():
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_is_gone_is_no_error(place, arguments):
    writer = gone()
    done = subprocess.run(
        command(arguments),
        cwd=place,
        env=surroundings(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141  # as a process that SIGPIPE has ended


def test_a_reader_of_errors_that_is_gone(place):
    for arguments in (["train", "nothing"], ["chekc"]):
        writer = gone()
        done = subprocess.run(
            command(arguments),
            cwd=place,
            env=surroundings(),
            stdout=subprocess.PIPE,
            stderr=writer,
            text=True,
        )
        os.close(writer)
        assert done.stdout == "" and done.returncode in (2, 141)


def test_head_in_a_shell(place):
    line = f"{sys.executable} -m seht train digits --help | head -n 1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=surroundings(), capture_output=True, text=True
    )
    assert done.stdout.startswith("usage: seht train") and done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(place):
    for arguments in (["--help"], ["check", "mine:example"], ["report", "compared"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                command(arguments),
                cwd=place,
                env=surroundings(),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert done.returncode == 2
        assert done.stderr.startswith("seht: error: cannot write: No space")
        assert done.stderr.count("\n") == 1


def test_closed_outputs(place):
    line = f"{sys.executable} -m seht check mine:example >&-; echo $?"
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=surroundings(), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_another_broken_pipe_is_not_hidden(monkeypatch, capsys):
    """A worker that has died is a mistake of the program, and shown."""
    from seht import cli

    def broken(arguments):
        raise BrokenPipeError("a worker")

    monkeypatch.setattr("seht.commands.check.run_check", broken)
    with pytest.raises(BrokenPipeError, match="a worker"):
        cli.main(["check", "mine:example"])
