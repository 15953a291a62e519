"""The command ``seht measure``: table, JSON and page, for anyone's models and the lab's runs."""

import json
import math
import re
import sys

import pytest
import torch

from seht import cli
from seht.measure.numbers import duration, number, with_error

MINE = """
import torch
import torch.nn.functional as F
from torch import nn

def data():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(40, 5, generator=draw), torch.arange(40) % 3

def batches():
    x, y = data()
    return iter([(x[:25], y[:25]), (x[25:], y[25:])])

def _net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

def small(): return _net(4)
def wide(): return _net(9)
def pair(): return _net(4), loss
def example(): return *pair(), data(), data()
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
def summed(model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
def broken():
    net = _net(4)
    net[0].weight.data[0, 0] = float("nan")
    return net
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("levels", torch.ones(3, 5, dtype=torch.int8))
    def forward(self, x): return x @ self.levels.float().T
def whole(): return Whole()
def rounded():
    net = _net(4)
    for layer in (net[0], net[3]):
        layer.weight.data = layer.weight.data.sign() * 0.5
    return net
def keys(): return dict(zip("xy", data()))
def nothing(): return None
def number(): return 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "measured_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        sys.modules.pop("measured_mine", None)
        try:
            code = cli.main(["measure", *arguments])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


def mine(*models, data="data"):
    named = [part for m in models for part in ("--model", f"measured_mine:{m}")]
    return [*named, "--data", f"measured_mine:{data}"]


def test_a_table(run):
    code, out, err = run(*mine("small", "wide"))
    assert code == 0, err
    assert re.search(r"tr\(H\) +\S+ ± \S+ +\S+ ± \S+", out)
    assert "0.weight" in out and "3.weight" in out and "per-sample" in out
    assert "λ max" not in out


def test_json_holds_every_figure_and_no_nan(run):
    code, out, _ = run(*mine("pair", data="batches"), "--what", "all", "--json", "-")
    found = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    (model,) = found["models"]
    assert code == 0 and model["trace"]["samples"] == 40
    assert model.keys() >= {
        "trace", "eigenvalues", "stability", "density", "landscape", "plane", "sharpness", "bound",
        "robustness",
    }  # fmt: skip
    low, high = model["trace"]["interval"]
    assert low < model["trace"]["estimate"] < high


def test_a_page_shows_what_was_measured_and_the_interval_is_useful(run, tmp_path):
    code, _, err = run(*mine("small"), "--html", "flat.html", "--json", "flat.json")
    assert code == 0, err
    page = (tmp_path / "flat.html").read_text()
    assert "Layers" in page and "Landscape" not in page and "Density" not in page
    [model] = json.loads((tmp_path / "flat.json").read_text())["models"]
    assert model.keys() == {"name", "trace"}
    assert model["trace"]["dof"] >= 7  # of one batch, without a word about probes


def test_the_page_is_self_contained(run, tmp_path):
    code, out, err = run(
        *mine("small", "wide"), "--what", "all", "--html", "flat.html", "--few", "20"
    )
    assert code == 0, err
    page = (tmp_path / "flat.html").read_text()
    assert page.count("<svg") >= 9 and "flat.html" in out
    assert "<script" not in page and not re.search(r'(?:src|href)="(?!#|data:)', page)
    for words in (
        "How flat",
        "Layers",
        "Spectrum",
        "Density",
        "Landscape",
        "Robustness",
        "measured_mine:wide",
    ):
        assert words in page
    assert "seht measure --model measured_mine:small" in page
    assert not list(tmp_path.glob("*.part"))


def test_robustness_by_its_name(run, tmp_path):
    """`seht measure robustness`: table, layers, JSON and figures, as of the other measurements."""
    code, out, err = run(
        "robustness", *mine("small", "wide"), "--html", "r.html", "--json", "r.json"
    )
    assert code == 0, err
    for title in ("rise, 8 bits", "rise, 4 bits", "rise, 3 % noise", "... by the trace"):
        assert re.search(rf"{title} +\S+.* +\S+", out), title
    head = out.index("rise, 4 bits in one layer")
    assert "0.weight" in out[head:] and "3.weight" in out[head:]
    assert re.search(r"small: \d of 2 layers take 4 bits, each alone", out)
    assert "λ max" not in out and "rise, random" not in out  # nothing else was asked for
    first, second = json.loads((tmp_path / "r.json").read_text())["models"]
    found = first["robustness"]
    assert found["rounded"].keys() == {"8", "4", "3"} and found["layers"].keys() == {
        "0.weight", "3.weight",
    }  # fmt: skip
    assert found["noise"]["0.03"]["predicted_stderr"] > 0
    assert second["robustness"]["loss"] != found["loss"]
    page = (tmp_path / "r.html").read_text()
    assert "Rise under noise" in page and "Rise with one layer at 4 bits" in page
    assert "<dt>rise at so many bits, under noise</dt>" in page
    assert (
        run(*mine("small", "wide"), "--what", "robustness")[1].splitlines()[0]
        == (out.splitlines()[0])
    )


def test_what_the_doctor_takes_will_do(run):
    expected = json.loads(run(*mine("pair"), "--json", "-")[1])["models"][0]["trace"]
    found = json.loads(run("--model", "measured_mine:example", "--json", "-")[1])["models"][0]
    for key in ("estimate", "stderr", "samples"):
        assert found["trace"][key] == expected[key]


def test_a_model_without_its_option(run):
    """As `seht check` and `seht doctor` take it."""
    expected = run("layers", "--model", "measured_mine:example", "--json", "-")
    found = run("layers", "measured_mine:example", "--json", "-")
    assert found[0] == expected[0] == 0
    figures = [json.loads(out)["models"][0]["trace"]["estimate"] for _, out, _ in (found, expected)]
    assert figures[0] == figures[1]
    assert run("measured_mine:smal")[2].startswith("seht: error: module 'measured_mine' has no")


def test_weights_that_are_rounded_already_are_named_in_a_plain_line(run):
    code, out, err = run("robustness", *mine("rounded"))
    assert code == 0 and "rise, 4 bits" in out
    assert err.startswith("warning: 0.weight, 3.weight: rounded to 4 bits already")
    assert len(err.strip().splitlines()) == 1


def test_a_run_may_be_called_like_a_measurement(run, tmp_path):
    (tmp_path / "robustness").mkdir()
    code, _, err = run("robustness")
    assert code == 2 and "robustness is neither a run" in err


def test_what_and_how_well(run):
    for what in ("eigenvalues", "density,landscape", "sharpness", "bound"):
        code, out, err = run(*mine("small"), "--what", what, "--few", "20", "--seed", "3")
        assert code == 0, err
    code, out, _ = run(*mine("small"), "--tol", "0.2", "--curvature", "ggn", "--json", "-")
    trace = json.loads(out)["models"][0]["trace"]
    assert trace["reached"] and trace["stderr"] <= 0.2 * trace["estimate"]
    assert trace["curvature"] == "ggn"
    code, out, _ = run(*mine("small"), "--samples", "10")
    assert "only 10 samples were read; how far" in out  # one micro-batch says nothing of others
    code, out, _ = run(*mine("small"), "--samples", "20", "--micro-batch", "5")
    assert re.search(r"only 20 samples were read; .* may differ by \d", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give runs to measure, or --model and --data"),
        (["--model", "measured_mine:small"], "measured_mine:small needs --data"),
        (["--data", "measured_mine:data"], "--data needs --model"),
        (["runs/nowhere"], "runs/nowhere is neither a run"),
        (["nowhere"], "unknown run or measurement 'nowhere'"),
        (["trce", *mine("small")], "unknown run or measurement 'trce'; did you mean 'trace'"),
        (mine("number"), "must return a torch.nn.Module"),
        (mine("small", data="number"), "must return a batch, a data set"),
        (mine("small", data="keys"), "error: without a loss function a batch must be"),
        (mine("smal"), "did you mean 'small'"),
        (["robustness", *mine("whole")], "levels holds whole numbers: it is quantised already"),
        (mine("broken"), "'0.weight' holds values that are not finite"),
        ([*mine("small"), "--loss", "measured_mine:summed"], "returns a sum over the examples"),
        ([*mine("small"), "--what", "tarce"], "did you mean 'trace'"),
        ([*mine("small"), "--html", "no/where.html"], "there is no such directory"),
        ([*mine("small"), "--probes", "0"], "--probes: must be a whole number from 1 to"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_named_in_one_line(run, tmp_path, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and not out
    assert re.search(message, err), err
    assert "Traceback" not in err and len(err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("*.html"))


# --- runs of the lab --------------------------------------------------------------------------


@pytest.fixture
def comparison(tmp_path):
    """Two runs as `seht compare` leaves them, untrained."""
    from dataclasses import replace

    from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
    from seht.lab.data import load
    from seht.lab.models import build
    from seht.lab.recipes import to_dict

    recipe = Recipe(
        "tiny", DataConfig("digits", size=60), ModelConfig("cnn", width=4), OptimConfig(0.1), 20, 1
    )
    for seed in (0, 1):
        home = tmp_path / "out" / "runs" / "plain" / f"seed-{seed}"
        home.mkdir(parents=True)
        torch.manual_seed(seed)
        model = build(recipe.model, load(recipe, seed))
        torch.save(model.state_dict(), home / "model.pt")
        config = {"recipe": to_dict(replace(recipe)), "method": "plain", "seed": seed}
        (home / "config.json").write_text(json.dumps(config))
    return tmp_path / "out"


def test_runs_and_comparisons(run, comparison):
    code, out, err = run(str(comparison), "--samples", "40", "--json", "-")
    assert code == 0, err
    models = json.loads(out)["models"]
    assert [m["name"] for m in models] == ["plain, seed 0", "plain, seed 1"]
    assert models[0]["trace"]["estimate"] != models[1]["trace"]["estimate"]
    one = comparison / "runs" / "plain" / "seed-0"
    for path in (one, one / "model.pt"):
        code, out, err = run(str(path), "--samples", "40", "--json", "-")
        assert code == 0, err
        assert json.loads(out)["models"][0]["trace"]["estimate"] == pytest.approx(
            models[0]["trace"]["estimate"]
        )


def test_a_run_that_is_broken(run, comparison):
    home = comparison / "runs" / "plain" / "seed-0"
    (home / "model.pt").write_bytes(b"nothing")
    code, _, err = run(str(home))
    assert code == 2 and "does not hold this run's weights" in err
    (home / "model.pt").unlink()
    code, _, err = run(str(home))
    assert code == 2 and "the run is not done" in err


# --- numbers ----------------------------------------------------------------------------------


def test_numbers():
    assert number(1234.5) == "1,230" and number(0.012345) == "0.0123" and number(0) == "0"
    assert number(math.nan) == "–" and number(None) == "–" and number(-math.inf) == "−∞"
    assert number(-2.5e-9) == "−2.50e−9"
    assert (
        with_error(511.34, 13.2) == "511 ± 13" and with_error(-0.51234, 0.0123) == "−0.512 ± 0.012"
    )
    assert with_error(3.14159, math.nan) == "3.142" and with_error(5.0, 0.0) == "5.000"
    assert with_error(-1e-9, 1e-5) == "0.000000 ± 0.000010"
    assert duration(0.057) == "0.057 s" and duration(75) == "75 s" and duration(600) == "10.0 min"
    assert duration(9000) == "2.5 h"
