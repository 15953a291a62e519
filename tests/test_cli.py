"""The command: what it prints, what it returns, and how it fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import seht
from seht import cli

EXAMPLES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def data():
    return torch.randn(6, 4), torch.arange(6) % 3


def right():
    x, y = data()
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return net, loss_fn, (x, y)


def with_held_out():
    return *right()[:2], torch.utils.data.TensorDataset(*data()), data()


def from_loader():
    return *right()[:2], iter([data(), data()])


def nothing():
    return *right()[:2], iter([])


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.clone()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x.cos()


class Wave(nn.Module):
    def forward(self, x):
        return Sine.apply(x)


def wrong():
    return nn.Sequential(nn.Linear(4, 8), Wave(), nn.Linear(8, 3)), loss_fn, data()


def pair():
    return right()[:2]


def raises():
    return {}["missing"]


def not_a_model():
    return 1, loss_fn, data()


def not_scalar():
    return right()[0], lambda model, batch: model(batch[0]), data()


class Recipes:
    example = staticmethod(right)


number = 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command in a directory with a file of examples: (exit code, stdout, stderr)."""
    (tmp_path / "example_recipes.py").write_text(EXAMPLES)
    (tmp_path / "example_broken.py").write_text("import there_is_no_such_package\n")
    (tmp_path / "example_syntax.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        for name in ("example_recipes", "example_broken"):
            sys.modules.pop(name, None)
        try:
            code = cli.main(arguments)
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


def test_help_teaches(run):
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = run(*arguments)
        assert code == 0 and not err
        assert "seht check train:example" in out and "examples:" in out
    code, out, _ = run("check", "--help")
    assert code == 0
    for words in ("return model, lambda model, batch", "--engine", "--seed", "--json", "Exit code"):
        assert words in out


def test_list_and_the_help_of_the_lab(run):
    from seht.lab.methods import METHODS
    from seht.lab.paper import PRESETS
    from seht.lab.recipes import RECIPES

    code, out, _ = run("list")
    assert code == 0
    for name in (*RECIPES, *METHODS, *PRESETS):
        assert re.search(rf"^  {name} +\S.*\w", out, re.MULTILINE), name
    assert ":math:" not in out and "``" not in out
    assert run("list", "methods")[1].startswith("methods:\n  weight-decay ")
    assert out.strip() in run("compare", "--help")[1]
    taught = run("train", "--help")[1]
    assert "\nmethods:\n" in taught and "\npresets:\n" not in taught
    assert run("list", "methodz")[0] == 2


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert re.fullmatch(r"seht \d+\.\d+\.\d+\S* \(torch \d\S+, Python \d+\.\d+\.\d+\)\n", out)


def test_check_of_a_right_model(run):
    code, out, err = run("check", "example_recipes:right", "--directions", "2")
    assert code == 0 and not err
    assert "engine autograd: the penalty's gradient can be trusted" in out
    assert "engine difference: the penalty's gradient can be trusted" in out
    assert "over 2 directions" in out and " steps at kappa=" in out
    assert "--curvature ggn checks" in out.splitlines()[-1]  # the penalty's own default
    assert run("check", "example_recipes:Recipes.example", "--engine", "autograd")[0] == 0


def test_check_of_what_will_be_run(run):
    form = ("--curvature", "ggn", "--boundary", "3", "--estimator", "seht-d", "--engine", "auto")
    code, out, _ = run("check", "example_recipes:right", *form, "--directions", "1")
    assert code in (0, 1) and "seht-d, curvature='ggn', boundary='3'" in out
    assert "note:" not in out


@pytest.mark.parametrize("name", ["right", "with_held_out", "from_loader"])
def test_check_and_doctor_take_the_same(run, name):
    code, out, err = run("check", f"example_recipes:{name}", "--engine", "auto")
    assert code == 0 and "can be trusted" in out and not err
    code, out, err = run("doctor", f"example_recipes:{name}", "--budget", "5")
    assert code == 0 and "HessianTrace" in out, err


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_data_without_a_batch(run, command):
    code, _, err = run(command, "example_recipes:nothing")
    assert code == 2 and "data gives no batch" in err and err.count("\n") == 1


def test_what_one_batch_is():
    import torch

    from seht.commands.targets import one_batch

    x, y = torch.zeros(3, 2), torch.zeros(3)
    for whole in ((x, y), {"x": x}, x, [x, y], ([x, x], [{"boxes": y}]), "text", 3):
        assert one_batch(whole) is whole
    assert one_batch([(x, y), (y, x)])[0] is x


def test_check_of_a_wrong_model(run):
    code, out, _ = run("check", "example_recipes:wrong")
    assert code == 1
    assert "WRONG" in out and "because of module '1' (Wave)" in out
    assert run("check", "example_recipes:wrong", "--engine", "difference")[0] == 0


def test_json(run):
    code, out, _ = run("check", "example_recipes:wrong", "--json", "--engine", "autograd")
    report = json.loads(out)
    assert code == 1 and report["ok"] is False
    assert report["engines"].keys() == {"autograd"}
    assert report["engines"]["autograd"]["verdict"] == "wrong"
    assert report["engines"]["autograd"]["module"] == "1"


def test_the_seed_changes_the_probes(run):
    arguments = ("check", "example_recipes:wrong", "--json", "--engine", "autograd", "--seed")
    errors = [json.loads(run(*arguments, s)[1])["engines"]["autograd"]["error"] for s in "112"]
    assert errors[0] == errors[1] != errors[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "example_recipes"], "not module:function"),
        (["check", ":right"], "not module:function"),
        (["check", "example_recipes:"], "not module:function"),
        (["check", "example_nowhere:right"], "no module 'example_nowhere'"),
        (["check", "../a/train.py:right"], r"is a path; in ../a, give the module .*: train:right"),
        (["check", "example_recipes.py:right"], "without .py"),
        (["check", "example_broken:right"], "cannot be imported: .*there_is_no_such_package"),
        (["check", "example_syntax:right"], "cannot be imported: SyntaxError"),
        (["check", "example_recipes:rigth"], "no function 'rigth'; did you mean 'right'"),
        (["check", "example_recipes:number"], "a value of type int, not a function"),
        (
            ["check", "example_recipes:pair"],
            r"must return \(model, loss_fn, data\) or .*held_out\), not a tuple of 2",
        ),
        (["check", "example_recipes:raises"], r"raised KeyError: 'missing' \(.*, line \d+\)"),
        (["check", "example_recipes:not_a_model"], "must be a torch.nn.Module, not int"),
        (["check", "example_recipes:not_scalar"], "must be a scalar"),
        (["check", "example_recipes:right", "--engine", "autogard"], "did you mean 'autograd'"),
        (["check", "example_recipes:right", "--directions", "0"], "must be a whole number from 1"),
        (["check", "example_recipes:right", "--directions", "x"], "must be a whole number from 1"),
        (["check"], "required: module:function"),
        (["chekc"], "unknown choice .chekc.; did you mean .check."),
        (["--nonsense"], "unknown option .--nonsense. .known: --help, --version"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_mistakes_are_named_in_one_line_without_a_traceback(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and not out
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if "error:" in line]) == 1


def test_python_m(run):
    """In a process of its own, where the working directory is not importable by itself."""
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    done = subprocess.run(
        [*command, "-m", "seht", "check", "example_recipes:pair"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(seht.__file__).parents[1])},
    )
    assert done.returncode == 2
    assert "must return (model, loss_fn, data)" in done.stderr and "Traceback" not in done.stderr


def test_the_command_is_installed_under_its_name():
    from importlib.metadata import PackageNotFoundError, entry_points, version

    try:
        version("seht")
    except PackageNotFoundError:
        pytest.skip("the package is not installed here")
    (script,) = entry_points(group="console_scripts", name="seht")
    assert script.load() is cli.main
