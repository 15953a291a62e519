"""Recipes that train in a fraction of a second, and commands in processes that can be killed."""

import csv
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path

from seht.lab.fields import override
from seht.lab.methods.parse import parse
from seht.lab.recipes import recipe
from seht.lab.trials import Execution, Trial

FEW = {
    "epochs": "3",
    "batch": "25",
    "data.size": "100",
    "data.validation": "50",
    "model.width": "4",
    "threads": "1",
}
TEXT = {
    "epochs": "3",
    "data.size": "1500",
    "data.vocabulary": "50",
    "data.bptt": "10",
    "batch": "10",
    "eval_batch": "200",
    "model.embedding": "8",
    "model.hidden": "8",
    "threads": "1",
}


HEAVY = (
    "lightning_fabric",
    "jinja2",
    "matplotlib.backends.backend_svg",
    "rich.table",
    "scipy.special",
    "sklearn.datasets",
    "tensorboard.summary.writer.record_writer",
)


def digits(**changes):
    return override(recipe("digits"), {**FEW, **changes})


def pydocs(**changes):
    return override(recipe("pydocs"), {**TEXT, **changes})


def train(recipe, method, seed, out, *, watch=None, patience=0.0, devices=1, test=True, **how):
    """One run of the method with that text."""
    trial = Trial(recipe, parse(method), seed, Path(out), test, execution=Execution(**how))
    return trial.run(watch, patience, devices)


def options(changes=FEW):
    """The same as arguments of a command."""
    return [word for name, value in changes.items() for word in (f"--{name}", value)]


def timeless(value):
    """Without whatever depends on the clock."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not k.startswith(("seconds", "ratio"))}
    return value


def outcome(directory):
    """Everything that a comparison's records say, but for times."""
    found = {}
    for file in sorted(Path(directory).rglob("*")):
        name = str(file.relative_to(directory))
        if file.suffix == ".csv":
            found[name] = [timeless(row) for row in csv.DictReader(file.open())]
        elif file.suffix == ".json" and file.name != "cost.json":
            found[name] = timeless(json.loads(file.read_text()))
        elif file.suffix == ".part" or file.name == "checkpoint.pt":
            found[name] = "left over"
    return found


def rows(directory):
    """Epochs that are done, of all runs of a comparison: those that judge, search and tune."""
    files = Path(directory).glob("*/*/*/metrics.csv")
    return sum(len(file.read_text().splitlines()) - 1 for file in files)


def command(arguments, log, limit):
    """``seht`` with these arguments; what it says goes to the log."""
    import resource

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    import torch

    from seht import cli

    torch.set_num_threads(1)
    code = cli.main(arguments)
    sys.stdout.flush()
    os._exit(code)


def start(arguments, log, limit=None):
    """The command in a process of its own; ``limit``: bytes that a file may have at most."""
    for module in HEAVY:  # forked with everything in memory that takes seconds to import
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=command, args=([str(a) for a in arguments], str(log), limit))
    process.start()
    return process
