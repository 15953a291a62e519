"""`python benchmarks/measuring` on a tiny scale: what it measures, extrapolates and writes."""

import json
import math

import pytest
import torch
from measuring import __main__ as program
from measuring import command, memory, problems
from measuring.problems import Size, Trained, loss_fn
from measuring.rivals import RIVALS, Sample, products_to
from torch import nn


@pytest.fixture
def tiny(monkeypatch):
    """A small network and made-up data, instead of a download and an hour."""

    def make(size, data_dir):
        draw = torch.Generator().manual_seed(0)
        y = torch.arange(size.train) % 3
        x = torch.randn(3, 6, generator=draw)[y] + torch.randn(size.train, 6, generator=draw)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        return net, (x, y), (x[: size.samples], y[: size.samples])

    monkeypatch.setitem(problems.PROBLEMS, "resnet18", ("a small network", make))
    size = Size(64, 8, 64, batch=16)
    monkeypatch.setattr(command, "FAST", {"resnet18": size, "gpt": size})
    monkeypatch.setattr(command, "TOL", 0.2)


@pytest.mark.slow
def test_the_report(tiny, tmp_path, capsys):
    out, file = tmp_path / "r.md", tmp_path / "r.json"
    arguments = ["--fast", "--model", "resnet18", "--products", "12"]
    program.main([*arguments, "--out", str(out), "--json", str(file)])
    printed = capsys.readouterr().out
    assert printed == out.read_text() and "nested autograd" in printed and "peak memory" in printed
    found = json.loads(file.read_text())["models"][0]
    ours, nested = found["lines"][:2]
    error = math.hypot(ours["stderr"], nested["stderr"])
    assert abs(ours["estimate"] - nested["estimate"]) < 5 * error
    assert ours["stderr"] <= 0.21 * abs(ours["estimate"])
    reached = ours["stderr"] / abs(ours["estimate"])
    assert nested["equal"] == pytest.approx(nested["ratio"] * (0.2 / reached) ** 2)
    assert found["memory"] > 0


def test_mistakes(capsys):
    for arguments, message in [
        (["--model", "resnet"], "did you mean 'resnet18'"),
        (["--products", "2"], "at least 6"),
        (["--out", "no/where.md"], "no such directory"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            program.main(arguments)
        assert message in capsys.readouterr().err


def test_extrapolation():
    plain = Sample(products=30, seconds=60.0, estimate=100.0, spread=40.0)
    assert plain.each == 2.0
    assert products_to(plain, 100.0, 0.02) == pytest.approx(400)
    sketched = Sample(30, 60.0, 100.0, spread=20.0, fixed=20)
    now = 20 / math.sqrt(10)  # its error with 10 residual probes
    assert products_to(sketched, 100.0, 0.02) == pytest.approx(min(20 + 100, 30 * now / 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_memory_is_measured_in_a_process_of_its_own(name):
    assert 0.3 < memory.ratio(name, 16, 1) < 5


def test_the_rivals_that_are_installed_agree():
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.arange(64) % 3
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() >= 2)
    batches = list(zip(x.split(16), y.split(16), strict=True))
    problem = Trained("small", model, batches, 0.0)
    from seht import exact_trace

    exact = float(exact_trace(model, lambda: loss_fn(model, (x, y))))
    for rival in RIVALS:
        if rival.package is not None:
            try:
                __import__(rival.package)
            except ImportError:
                continue
        sample = rival.run(problem, 60)
        free = max(1, sample.products - sample.fixed)
        assert abs(sample.estimate - exact) < 5 * sample.spread / math.sqrt(free), rival.name
    assert all(p.grad is None for p in model.parameters())
