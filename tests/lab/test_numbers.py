"""Numbers that make no sense, for every option of every command: one line, and nothing on disk."""

import typing

import pytest

from seht import cli
from seht.lab import fields, recipes
from seht.lab.methods import METHODS
from seht.lab.methods.parse import options

NEVER = ["nan", "inf", "-inf", "1e400", "", "x", "٣", "½", "1_0", "-1"]
"""No finite number of at least 0."""
HUGE = ["9" * 25, "1e20", "1.5", "-1", "nan", "", "٣", "9" * 5000]
"""No count of anything."""

COUNTS = [
    (["check", "nowhere:example"], ["--directions", "--seed"]),
    (["train", "digits"], ["--seed", "--devices"]),
    (["compare", "digits"], ["--seeds", "--grid-seeds", "--jobs"]),
    (["measure", "run"], ["--probes", "--samples", "--few", "--micro-batch", "--seed"]),
    (["measure", "run"], ["--batch-dim"]),
    (["bench"], ["--repeats"]),
]
REALS = [
    (["train", "digits"], ["--save-every"]),
    (["compare", "digits"], ["--save-every"]),
    (["measure", "run"], ["--tol"]),
]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def stop(*arguments, **options):
        raise AssertionError("a run was begun")

    monkeypatch.setattr("seht.lab.training.Training.__init__", stop)

    def refused(arguments):
        try:
            code = cli.main(arguments)
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        said = f"{[word[:40] for word in arguments]}: {err[-300:]}"
        assert code == 2 and out == "", said
        assert len([line for line in err.splitlines() if "error:" in line]) == 1, said
        assert len(err.splitlines()[-1]) < 400 and "Traceback" not in err, said
        assert not list(tmp_path.iterdir()), said

    return refused


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        *(
            (c, o, [v for v in HUGE if (o, v) != ("--batch-dim", "-1")])
            for c, os in COUNTS
            for o in os
        ),
        *((c, o, [*NEVER, "9" * 5000]) for c, os in REALS for o in os),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else value,
)
def test_options_of_the_commands(refused, command, option, values):
    for value in values:
        refused([*command, f"{option}={value}"])


def numeric():
    return [field for field in fields.fields(recipes.recipe("digits")) if "number" in field.type]


def test_fields_of_a_recipe(refused):
    assert len(numeric()) > 20
    for field in numeric():
        if field.name.startswith("settings."):
            continue
        whole = "whole" in field.type
        values = HUGE if whole else NEVER
        if field.name == "optim.milestones":  # any whole number is an epoch, perhaps never reached
            values = ["1.5", "nan", "x", "٣", "1_0", "9" * 5000]
        for value in values:
            if value == "" and field.name == "optim.milestones":
                continue
            refused(["train", "digits", f"--{field.name}={value}"])
    for value in ("99999999999999", "1e20", "nan"):
        refused(["compare", "digits", f"--model.width={value}"])
    refused(["train", "digits", "--threads", "100000"])


def numbers_of(method):
    """Its options that take a number, and the values that no such option takes."""
    for option, hint in options(method).items():
        kinds = typing.get_args(hint) or (hint,)
        if int in kinds:
            yield option, ["nan", "inf", "1e400", "1.5", "٣", "9" * 5000, "9" * 25, "1_0", "x"]
        elif float in kinds:
            yield option, ["nan", "inf", "1e400", "٣", "x", "1_0"]


@pytest.mark.parametrize("method", list(METHODS))
def test_options_of_the_methods(refused, method):
    recipe = "digits" if "image" in METHODS[method].tasks else "pydocs"
    for option, values in numbers_of(method):
        for value in values:
            refused(["train", recipe, "--method", f"{method}({option}={value})"])
            refused(["train", recipe, "--method", method, f"--settings.{method}.{option}={value}"])


def test_resources_of_a_trial(refused):
    pytest.importorskip("ray")
    for value in ("cpus=nan", "cpus=-1", "gpus=inf", "cpus=", "cpus=1.5", "cpus=x", "cups=1", ""):
        refused(["compare", "digits", "--engine", "ray", f"--resources-per-trial={value}"])
