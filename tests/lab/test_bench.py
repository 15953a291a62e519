"""`seht bench`: statistics with known answers, the rows themselves, a tiny run of everything."""

import itertools
import json
import math

import pytest
import torch

from seht.cli import main
from seht.lab.bench import memory, runners, timing
from seht.lab.bench.accuracy import Errors, Moments, draw_moments, relative_error
from seht.lab.bench.cases import CASES
from seht.lab.bench.command import Command
from seht.lab.bench.results import FAST, FULL, Settings
from seht.lab.bench.rows import table
from seht.lab.bench.runners import Penalty, Runner

ROWS = {row.key: row for row in table()}


# Of weights that no training would use, and that the measurements need.
pytestmark = pytest.mark.filterwarnings("ignore::seht.PenaltyWarning")


@pytest.fixture
def mlp():
    return CASES["mlp"].problem("tiny", train=3)


# --- error and variance -----------------------------------------------------------------------


def test_relative_error():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(truth.float(), truth) == 0
    assert relative_error(torch.tensor([3.0, 5.0]), truth) == pytest.approx(0.2)
    assert relative_error(-truth, truth) == pytest.approx(2.0)


def test_moments_are_unbiased():
    """Over all sequences of four draws m + d or m - d: the variance is |d|^2, the mean m."""
    m, d = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.3, -2.0, 1.0])
    found = [
        Moments.of([m + sign * d for sign in signs])
        for signs in itertools.product((1, -1), repeat=4)
    ]
    assert sum(f.variance for f in found) / 16 == pytest.approx(float(d @ d))
    assert sum(f.squared_mean for f in found) / 16 == pytest.approx(float(m @ m))


def test_relative_variance_has_the_right_size_and_error():
    torch.manual_seed(0)
    mean = torch.ones(50)
    values = [
        Moments.of(mean + 2 * torch.randn(50) for _ in range(40)).relative_variance()
        for _ in range(30)
    ]
    off = [(v.value - 4.0) / v.error for v in values]  # 4 |1|^2 50 / 50
    assert abs(sum(v.value for v in values) / 30 - 4.0) < 0.3
    assert 0.5 < math.sqrt(sum(x * x for x in off) / 30) < 2.0  # errors are honest


def test_a_mean_that_is_not_seen_gives_no_variance():
    d = torch.tensor([1.0, -1.0])
    assert Moments.of([d, -d] * 8).relative_variance() is None


def test_constant_draws_have_no_variance():
    found = Moments.of([torch.tensor([1.0, 2.0])] * 16).relative_variance()
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.error == pytest.approx(0, abs=1e-12)


def test_variance_of_a_sparse_estimator():
    """It is m / p with probability p and 0 otherwise: the relative variance is 1 / p - 1."""
    m = torch.tensor([2.0, -1.0])
    whole, sparse = Moments.of([m] * 16), Moments.of([m / 0.1] * 16)
    assert sparse.relative_to(whole, 0.1).value == pytest.approx(9.0)


def test_offset():
    torch.manual_seed(0)
    base = torch.ones(20)
    draws = lambda mean: Moments.of(mean + 0.5 * torch.randn(20) for _ in range(64))
    assert draws(base).offset(draws(base)) is None
    assert draws(1.5 * base).offset(draws(base)) == pytest.approx(0.5, rel=0.2)


def test_errors_of_the_engines(mlp):
    errors = Errors(mlp, draws=2)
    for curvature in ("hessian", "ggn"):
        assert errors.of(ROWS[f"{curvature}/safe"]) < 1e-4
        assert errors.of(ROWS[f"{curvature}/scalar"]) < 0.02
        assert errors.of(ROWS[f"{curvature}/lean"]) < 0.02
    assert errors.of(ROWS["fisher"]) < 1e-4
    assert errors.of(ROWS["sam"]) is None


def test_nested_autograd_is_wrong_through_fused_norms():
    errors = Errors(CASES["wrn"].problem("tiny"), draws=1)
    assert errors.of(ROWS["hessian/fused"]) > 0.01
    assert errors.of(ROWS["hessian/safe"]) < 1e-3


def test_five_probes_have_a_fifth_of_the_variance(mlp):
    """The report takes that for granted."""
    one, _ = draw_moments(ROWS["ggn/scalar"], mlp, 150, math.inf)
    five, _ = draw_moments(ROWS["ggn/five"], mlp, 60, math.inf)
    assert five.variance / one.variance == pytest.approx(0.2, rel=0.4)


# --- rows -------------------------------------------------------------------------------------


def test_rows_are_complete():
    for curvature in ("hessian", "ggn"):
        for name in ("fused", "safe", "scalar", "lean", "five", "d0.01", "d0.05", "quarter"):
            assert ROWS[f"{curvature}/{name}"].curvature == curvature
    assert {"plain", "sam", "fisher"} <= ROWS.keys()
    assert all(row.same_draws is None or row.same_draws in ROWS for row in ROWS.values())


def test_seht_d_is_timed_in_the_right_proportions(mlp):
    runner = ROWS["hessian/d0.05"].runner(mlp)
    assert isinstance(runner, Penalty)
    assert runner.chance == pytest.approx(1 - 0.95**3)
    for turn in range(5):
        (weight, empty), *drawn = runner.plan(turn)
        assert weight == pytest.approx(0.95**3)
        assert weight + sum(w for w, _ in drawn) == pytest.approx(1)
        for draw in (empty, *(draw for _, draw in drawn)):
            runner.prepare(draw)
            runner.run()
            assert (runner.penalty.last.trace is None) is (draw == empty)


def test_timed_steps_are_without_checks(mlp):
    runner = ROWS["hessian/scalar"].runner(mlp)
    assert runner.steady()
    for draw in range(3):
        runner.prepare(draw)
        runner.run()
    assert runner.penalty.last.error is None  # nothing was compared
    assert runner.check_next()
    runner.prepare(3)
    runner.run()
    assert runner.penalty.last.error is not None


def test_sam_climbs_and_comes_back(mlp):
    before = [p.detach().clone() for p in mlp.model.parameters()]
    mlp.closure().backward()
    plain = [p.grad.clone() for p in mlp.model.parameters()]
    mlp.model.zero_grad()
    runners.SamStep(mlp).run()
    for p, old, g in zip(mlp.model.parameters(), before, plain, strict=True):
        torch.testing.assert_close(p.detach(), old)
        assert not torch.equal(p.grad, g)


def test_fisher_draws_the_same_labels_in_float64(mlp):
    z = mlp.logits(mlp.x).detach()
    runner = runners.FisherStep(mlp)
    first = runner._labels(z)
    assert torch.equal(first, runner._labels(z.double()))
    runner.prepare(1)
    assert not torch.equal(first, runner._labels(z))
    counts = torch.zeros(10)
    for draw in range(300):
        runner.prepare(draw)
        counts += torch.bincount(runner._labels(z), minlength=10)
    torch.testing.assert_close(counts / counts.sum(), z.softmax(1).mean(0), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    problem = CASES[name].problem("tiny", train=1)
    loss = problem.closure()
    part = problem.quarter(0)
    assert loss.isfinite()
    assert loss.dim() == 0
    assert not torch.equal(part(), problem.quarter(1)())
    assert torch.equal(problem.double().y, problem.y)
    assert {"full", "medium", "small", "mini", "tiny"} == CASES[name].sizes.keys()
    assert {*FULL.budgets} == {*FAST.budgets} == {*CASES}


# --- timing -----------------------------------------------------------------------------------


def test_timing():
    rounds = timing.Timing([1.0, 2.0, 3.0, 10.0, 4.0])
    assert rounds.ratio == 3.0
    assert rounds.quartiles == (2.0, 4.0)
    assert timing.Timing([1.0, 2.0, 6.0], averaged=True).ratio == 3.0
    assert timing.Timing([5.0]).quartiles == (5.0, 5.0)


def test_rows_that_fail_do_not_stop_the_others(mlp):
    class Broken(Runner):
        def run(self):
            raise RuntimeError("no double backward")

    failed = {}
    found, clock = timing.time_rows(
        mlp,
        {"broken": Broken(mlp), "plain": Runner(mlp)},
        slow=set(),
        rounds=2,
        slow_rounds=1,
        budget=60.0,
        failed=lambda key, error: failed.update({key: str(error)}),
    )
    assert failed == {"broken": "no double backward"}
    assert len(found["plain"].ratios) == 2
    assert clock.plain_median > 0


# --- all of it --------------------------------------------------------------------------------

TINY = Settings(
    scale="small",
    error_scale="tiny",
    variance_scale="tiny",
    rounds=1,
    slow_rounds=1,
    budgets={"mlp": 6.0},
    train=2,
    error_draws=1,
    variance_draws=16,
    variance_seconds=0.2,
    everything=False,
    threads=1,
)


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_a_tiny_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {name: str(tmp_path / name) for name in ("out.json", "plot.png", "report.md")}
    Command(["mlp"], json=files["out.json"], plot=files["plot.png"], out=files["report.md"]).run(
        TINY
    )
    printed = capsys.readouterr()
    text = (tmp_path / "report.md").read_text()
    assert printed.out == text
    assert "mlp: hessian/lean" in printed.err
    for wanted in ("## MLP", "| limit | time | memory |", torch.__version__, "(plot.png)"):
        assert wanted in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    def refuse(name):
        raise AssertionError(f"{name} in the JSON")

    data = json.loads((tmp_path / "out.json").read_text(), parse_constant=refuse)
    assert all(math.isfinite(number) for number in numbers(data))
    (found,) = data["models"]
    rows = {row["key"]: row for row in found["rows"]}
    assert rows.keys() == ROWS.keys()
    assert text.count("\n| ") >= len(rows)
    for key in ("hessian/scalar", "hessian/lean", "ggn/scalar", "ggn/lean"):
        for what in ("ratio", "low", "high", "memory", "error", "variance", "variance_time"):
            assert rows[key][what] > 0, (key, what)
    assert rows["plain"]["memory"] == 1
    assert found["plain_seconds"] > 0
    assert data["machine"]["threads"] == 1

    # Joined, it is not measured again: the same table, and nothing on standard error.
    assert main(["bench", "--model", "mlp", "--join", files["out.json"]]) == 0
    joined = capsys.readouterr()
    assert not joined.err
    assert [line for line in text.splitlines() if line.startswith("| ")] == [
        line for line in joined.out.splitlines() if line.startswith("| ")
    ]


def test_memory_of_a_row_that_fails_is_said(capfd):
    memory.main(["mlp", "tiny", "nonsense", "--threads=1"])  # in a process of its own
    found = json.loads(capfd.readouterr().out)
    assert found["row"] == "nonsense"
    assert "KeyError" in found["error"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "resnet"], "did you mean 'resnet18'"),
        (["--out", "no/such/place/RESULTS.md"], "no such directory"),
        (["--join", "no-such-file.json"], "cannot join 'no-such-file.json'"),
        (["--join", __file__], "that `seht bench --json` wrote"),
    ],
)
def test_mistakes_are_found_at_once(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
