"""Comparisons: killed and continued, failing in part, searching, and directories in use."""

import json
import random
import time
import warnings
from dataclasses import replace

import psutil
import pytest
from clusters import Dying
from small import FEW, digits, options, outcome, rows, start, timeless
from stops import end, killed_and_continued

from seht import PenaltyWarning, cli
from seht.lab import cost, search
from seht.lab.compare import Comparison, Entry, compare
from seht.lab.methods import METHODS as METHODS_OF_THE_LAB
from seht.lab.methods.parse import parse
from seht.lab.places import alone
from seht.lab.recipes import recipe
from seht.lab.records import Result, RunError
from seht.lab.schedulers.local import InTurn, Processes
from seht.lab.search import candidates, expand
from seht.lab.trials import Execution

METHODS = "weight-decay,seht-h(warmup=0),mixup+label-smoothing"
ROWS = 3 * 2 * int(FEW["epochs"])
CALL = [
    "compare",
    "digits",
    "--methods",
    METHODS,
    "--seeds",
    "2",
    "--save-every",
    "0",
    "--no-cost",
    *options(),
]


def entries(recipe, *texts):
    return tuple(Entry(parse(t), recipe) for t in texts)


def quiet(line):
    pass


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The comparison as it should be."""
    out = tmp_path_factory.mktemp("undisturbed")
    end(start([*CALL, "--out", out / "c"], out / "log"), out / "log")
    expected = outcome(out / "c")
    assert len(expected["table.csv"]) == 3 and rows(out / "c") == ROWS
    return expected


def test_a_killed_comparison_ends_with_the_same_table(tmp_path, undisturbed):
    killed_and_continued(CALL, tmp_path, undisturbed, ROWS, 1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills(tmp_path, undisturbed, seed):
    """A killed process loses some steps only: the moments wander through the comparison."""
    killed_and_continued(CALL, tmp_path, undisturbed, ROWS, 10, seed)


def test_a_full_disk_is_one_line_and_nothing_half_written(tmp_path, undisturbed):
    log, out = tmp_path / "log", tmp_path / "c"
    process = start([*CALL, "--out", out], log, limit=6000)
    process.join()
    said = log.read_text()
    assert process.exitcode == 2, said
    assert said.count("seht: error: cannot write") == 1 and "Traceback" not in said
    assert "File too large" in said and "run the same command again" in said
    assert not list(out.rglob("*.part")) and not list(out.rglob("result.json"))
    end(start([*CALL, "--out", out], log), log)
    assert outcome(out) == undisturbed


def test_two_processes_do_not_share_a_directory(tmp_path, undisturbed, capsys):
    log, out = tmp_path / "log", tmp_path / "c"
    process = start([*CALL, "--out", out], log)
    while process.exitcode is None and not list(out.glob("runs/*/*/metrics.csv")):
        time.sleep(0.01)
    assert cli.main([*CALL, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"seht: error: another process is working in {out};")
    assert said.count("\n") == 1
    end(process, log)
    assert outcome(out) == undisturbed


def test_a_run_in_use_is_refused(tmp_path, capsys):
    out = tmp_path / "run"
    with alone(out):
        assert cli.main(["train", "digits", "--out", str(out), *options()]) == 2
    assert "another process is working in" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_several_processes_give_the_same_table(tmp_path, undisturbed):
    log, out = tmp_path / "log", tmp_path / "c"
    end(start([*CALL, "--jobs", "2", "--out", out], log), log)
    assert outcome(out) == undisturbed


@pytest.mark.slow
def test_workers_leave_with_a_killed_driver(tmp_path, undisturbed):
    log, out = tmp_path / "log", tmp_path / "c"
    process = start([*CALL, "--jobs", "2", "--out", out], log)
    while process.exitcode is None and not list(out.glob("runs/*/*/metrics.csv")):
        time.sleep(0.01)
    process.kill()
    process.join()
    end(start([*CALL, "--jobs", "2", "--out", out], log), log)
    assert outcome(out) == undisturbed


@pytest.mark.slow
def test_a_killed_process_of_several_loses_nothing(tmp_path, undisturbed):
    log, out = tmp_path / "log", tmp_path / "c"
    process = start([*CALL, "--jobs", "2", "--out", out], log)
    while process.exitcode is None and not list(out.glob("runs/*/*/checkpoint.pt")):
        time.sleep(0.01)
    workers = [
        child
        for child in psutil.Process(process.pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
    random.Random(0).choice(workers).kill()
    end(process, log)
    assert "a process of the comparison has died" in log.read_text()
    assert outcome(out) == undisturbed


@pytest.mark.slow
def test_a_trial_that_kills_its_process_fails_and_the_others_finish(tmp_path):
    recipe = digits(epochs="1")
    comparison = Comparison(recipe, entries(recipe, "none", "mixup"), (0, 1), tmp_path / "c")
    first, *others = comparison.trials()
    dying = Dying(**{**vars(first), "out": tmp_path / "c" / "dying"})
    found = {}
    Processes(2).run([others[0], dying, *others[1:]], lambda t, r: found.update({t.out: r}))
    assert found[dying.out].reason == "its process has died 4 times, perhaps for want of memory"
    assert (tmp_path / "c" / "dying.attempts").read_text() == "xxxx"
    assert dying.finished() == found[dying.out]
    assert len(found) == 4 and all(found[trial.out].done for trial in others)


def test_a_failed_trial_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("seht.lab.cost.SECONDS", 0.3)
    recipe, said = digits(), []
    wild = digits(**{"optim.lr": "1e30"})
    rows = (*entries(recipe, "none"), Entry(parse("none"), wild, "optim.lr=1e30"))
    rows += entries(recipe, "mixup")
    out = tmp_path / "c"
    files = compare(Comparison(recipe, rows, (0, 1), out), say=said.append)
    failed = [line for line in said if "failed" in line]
    assert len(failed) == 2 and "none@optim.lr=1e30, seed 0: failed: the training loss" in failed[0]
    assert set(files) == {"table.md", "table.csv", "report.html"}
    table = files["table.md"].read_text()
    assert "failed" in table and "the training loss is" in table
    costs = json.loads((out / "cost.json").read_text())
    assert costs["none"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    for one in costs.values():
        assert 0 < one["low"] <= one["ratio"] <= one["high"]


def test_a_model_that_is_too_large_for_the_machine_fails_and_the_others_finish(tmp_path):
    recipe, said = digits(epochs="1"), []
    few = digits(epochs="1")
    huge = replace(few, model=replace(few.model, width=10**6))  # a convolution of 36 terabytes
    rows = (*entries(recipe, "none"), Entry(parse("none"), huge, "huge"))
    files = compare(Comparison(recipe, rows, (0,), tmp_path / "c"), costs=False, say=said.append)
    assert "none@huge, seed 0: failed: RuntimeError" in said[-1] and "allocate memory" in said[-1]
    assert "allocate memory" in files["table.md"].read_text()
    record = json.loads(
        (tmp_path / "c" / "runs" / "none@huge" / "seed-0" / "result.json").read_text()
    )
    assert (record["status"], record["steps"], record["metrics"]) == ("failed", 0, {})


def test_failed_runs_are_run_again_when_asked(tmp_path):
    """What made it fail is gone, so the same trial is done now; what was done stays."""
    recipe, out = digits(epochs="2"), tmp_path / "c"
    comparison = Comparison(recipe, entries(recipe, "none", "mixup"), (0,), out)
    compare(comparison, costs=False, say=quiet)
    expected = outcome(out)
    file = out / "runs" / "mixup" / "seed-0" / "result.json"
    failed = {**json.loads(file.read_text()), "status": "failed", "reason": "out of memory"}
    file.write_text(json.dumps({**failed, "metrics": {}}))
    said = []
    compare(comparison, costs=False, say=said.append)
    assert said == ["2 of 2 runs are done already"]
    table = (out / "table.md").read_text()
    assert "failed: out of memory; `seht compare --retry` runs it again" in table
    other = (out / "runs" / "none" / "seed-0" / "result.json").stat().st_mtime_ns
    compare(replace(comparison, execution=Execution(retry=True)), costs=False, say=said.append)
    assert "1 of 2 runs are done already" in said and said[-1].startswith("[2/2] mixup, seed 0")
    assert outcome(out) == expected
    assert (out / "runs" / "none" / "seed-0" / "result.json").stat().st_mtime_ns == other


def test_done_runs_are_skipped_and_new_ones_added(tmp_path):
    recipe, said = digits(epochs="1"), []
    first = Comparison(recipe, entries(recipe, "none"), (0,), tmp_path / "c")
    compare(first, costs=False, say=said.append)
    more = Comparison(recipe, entries(recipe, "none", "mixup"), (0, 1), tmp_path / "c")
    compare(more, costs=False, say=said.append)
    assert "1 of 4 runs are done already" in said
    assert [line.split(" ")[0] for line in said if line.startswith("[")] == [
        "[1/1]", "[2/4]", "[3/4]", "[4/4]",
    ]  # fmt: skip
    other = digits(epochs="2")
    with pytest.raises(RunError, match=r"recipe\.epochs is 1 there, 2 here"):
        compare(Comparison(other, entries(other, "none"), (0,), tmp_path / "c"), say=quiet)


def test_pairs_are_complete_early(tmp_path):
    recipe = digits()
    comparison = Comparison(recipe, entries(recipe, "none", "mixup"), (0, 1), tmp_path)
    order = [(trial.seed, trial.method.text) for trial in comparison.trials()]
    assert order == [(0, "none"), (0, "mixup"), (1, "none"), (1, "mixup")]


def test_a_comparison_needs_a_scheduler_only_to_run(tmp_path):
    """The seam: whatever runs the trials, wherever, the table is the same."""

    class Backwards:
        def run(self, trials, done):
            for trial in reversed(trials):
                done(trial, trial.run())

    recipe, found = digits(epochs="1"), []
    for name, scheduler in (("a", InTurn()), ("b", Backwards())):
        comparison = Comparison(recipe, entries(recipe, "none", "mixup"), (0, 1), tmp_path / name)
        compare(comparison, scheduler=scheduler, costs=False, say=quiet)
        found.append(outcome(tmp_path / name))
    assert found[0] == found[1]
    assert callable(Processes(2).run)


# --- the search -------------------------------------------------------------------------------


def test_alternatives():
    assert expand("seht-h") == ["seht-h"]
    assert expand("seht-h(weight=1e-3|1e-2,probes=1|5)+mixup") == [
        f"seht-h(weight={w},probes={p})+mixup" for w in ("1e-3", "1e-2") for p in (1, 5)
    ]


def test_candidates_on_the_paper_s_recipes_are_the_paper_s_unless_given():
    ten, hundred = recipe("cifar10-small"), recipe("cifar100")
    assert candidates("weight-decay", ten) == ["weight-decay"]
    weights = (0.0001, 0.001, 0.01, 0.1)
    assert candidates("seht-h", ten) == [f"seht-h(weight={w})" for w in weights]
    assert len(candidates("seht-d", ten)) == 4 * 3 * 2
    for name in ("seht-h", "seht-d", "confidence-penalty", "label-smoothing"):
        assert candidates(name, hundred) == [f"{name}(weight={w})" for w in weights]
    fixed = candidates("seht-d(prob=0.5)+label-smoothing", ten)
    assert len(fixed) == 4 * 3 * 5
    assert all("prob=0.5" in text for text in fixed)
    for text in fixed:
        parse(text)


def test_elsewhere_every_method_has_the_same_budget():
    made = recipe("digits-noisy")
    without = {"none", "cutout", "early-stopping"}  # nothing to search, or a size of the data
    for name in METHODS_OF_THE_LAB:
        found = candidates(name, made)
        assert len(found) == len(set(found)) == (1 if name in without else 7), name
        for text in found:
            parse(text).build(made)
    # The best seen is inside: with a budget of five, too.
    for budget in (None, 5):
        found = candidates("label-smoothing", made, budget)
        assert "label-smoothing(eps=0.5)" in found and "label-smoothing(eps=0.8)" in found


def test_a_budget():
    made = recipe("digits-noisy")
    three = candidates("seht-h", made, 3)
    assert three == [f"seht-h(weight={w})" for w in (0.0001, 0.003, 0.1)]
    assert candidates("seht-h", made, 1) == ["seht-h(weight=0.003)"]
    both = [list(parse(text).parts.values()) for text in candidates("seht-h+weight-decay", made)]
    assert len(both) == 7
    for part in (0, 1):  # most values of either are tried
        assert len({str(parts[part]) for parts in both}) >= 5
    assert candidates("sam(rho=0.07)", made) == ["sam(rho=0.07)"]
    assert len(candidates("sam(rho=0.07|0.08|0.09)", made)) == 3
    with pytest.raises(ValueError, match="3 alternatives and --budget is 2; leave some out"):
        candidates("sam(rho=0.07|0.08|0.09)", made, 2)


def test_a_budget_belongs_to_a_search(tmp_path, capsys):
    assert cli.main(["compare", "digits", "--budget", "3", "--out", str(tmp_path / "c")]) == 2
    assert "--budget belongs to --grid" in capsys.readouterr().err


def test_a_search_looks_at_the_weights_that_the_report_compares():
    def result(last, best):
        return Result("done", None, "m", 0, 2, 2, 1.0, {"last": last, "best": best})

    text = result({"valid_loss": 5.0}, {"valid_loss": 4.0, "epoch": 1})
    assert search.score([text, text]) == (0.0, -4.0)
    image = result({"valid_loss": 2.0, "valid_top1": 60.0}, {"valid_loss": 1.0, "valid_top1": 70.0})
    assert search.score([image]) == (60.0, -2.0)


def test_the_search_keeps_what_is_best_on_the_validation_split(tmp_path):
    """A learning rate that is far too small must lose; nothing of the test set is recorded."""
    changes = {"epochs": "12", "model.width": "8", "optim.lr": "0.2"}
    recipe, said = digits(**changes), []
    slow = digits(**{**changes, "optim.lr": "0"})
    row = [Entry(parse("none"), slow, "slow"), *entries(recipe, "none")]
    baseline = list(entries(recipe, "weight-decay"))
    comparison = Comparison(recipe, (baseline[0], row[0]), (0, 1), tmp_path / "c")
    compare(comparison, grid=[baseline, row], costs=False, say=said.append)
    asked = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert asked["methods"] == ["weight-decay", "none"] and "chosen: none" in said
    record = json.loads((tmp_path / "c" / "grid.json").read_text())
    assert [(c["method"], c["chosen"]) for c in record["candidates"]] == [
        ("none@slow", False), ("none", True),
    ]  # fmt: skip
    for result in (tmp_path / "c" / "grid").rglob("result.json"):
        metrics = json.loads(result.read_text())["metrics"]["last"]
        assert not [name for name in metrics if name.startswith("test")]
    assert record["runs"] == {"weight-decay": 0, "none": 2}
    assert record["seeds"] == [search.FIRST_SEED]  # none of those that judge
    searched = {int(path.name.partition("-")[2]) for path in (tmp_path / "c" / "grid").glob("*/*")}
    assert not searched & set(comparison.seeds)
    again = []
    compare(comparison, grid=[baseline, row], costs=False, say=again.append)
    assert "2 of 2 runs are done already" in again and "4 of 4 runs are done already" in again


def test_timing_says_nothing_about_a_training(tmp_path, monkeypatch):
    """Its steps go on after the last one of the training that it is about."""
    monkeypatch.setattr(cost, "SECONDS", 0.1)
    recipe = digits(epochs="1")
    rows = entries(recipe, "weight-decay", "seht-h(weight=tuned,warmup=0)")
    (tmp_path / "c").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenaltyWarning)
        cost.complete(Comparison(recipe, rows, (0,), tmp_path / "c"), quiet)
    found = json.loads((tmp_path / "c" / "cost.json").read_text())
    assert [*found] == ["weight-decay", rows[1].name]


@pytest.mark.parametrize(
    "chosen, tried, option",
    [
        ("mixup(alpha=8)", ["mixup(alpha=1)", "mixup(alpha=2)"], "alpha"),
        ("mixup(alpha=0.5)", ["mixup(alpha=1)", "mixup(alpha=2)"], "alpha"),
        ("mixup(alpha=1)", ["mixup(alpha=0.5)", "mixup(alpha=2)"], None),
        ("mixup(alpha=1)", ["mixup(alpha=2)"], None),  # two have no middle
        ("sam(rho=1)+ema(decay=0.9)", ["sam(rho=2)+ema(decay=0.9)"] * 2, None),
        ("seht-h(weight=tuned)", ["seht-h(weight=1)", "seht-h(weight=2)"], None),
    ],
)
def test_the_best_at_the_edge_of_what_was_tried(chosen, tried, option):
    best, *others = entries(digits(), chosen, *tried)
    assert search.at_edge(best, [best, *others]) == option


def test_a_search_whose_candidates_all_fail_chooses_nothing(tmp_path, capsys):
    weights = "seht-h(weight=1e20|1e21|1e22,every=1,warmup=0,limit=none)"
    words = ["compare", "digits", "--methods", weights, "--grid", "--grid-seeds", "1"]
    words += ["--seeds", "1", "--no-cost", *options(), "--out", str(tmp_path / "c")]
    cli.main(words)
    said = capsys.readouterr().out
    assert "all 3 candidates failed: seht-h(weight=1e+20" in said and "chosen:" not in said
    found = json.loads((tmp_path / "c" / "grid.json").read_text())
    assert [row["chosen"] for row in found["candidates"]] == [False] * 3 and not found["edges"]


def test_a_search_needs_a_validation_split(tmp_path):
    recipe = digits(**{"data.validation": "0"})
    rows = [list(entries(recipe, "none", "mixup"))]
    with pytest.raises(RunError, match=r"hold some training examples out with --data\.validation"):
        compare(Comparison(recipe, (rows[0][0],), (0,), tmp_path / "c"), grid=rows, say=quiet)
    assert not (tmp_path / "c").exists()


def test_seeds_of_the_search_may_not_judge(tmp_path):
    rows = [list(entries(digits(), "none", "mixup"))]
    seeds = (search.FIRST_SEED,)
    with pytest.raises(RunError, match="choose a smaller --first-seed"):
        compare(Comparison(digits(), (rows[0][0],), seeds, tmp_path / "c"), grid=rows, say=quiet)


def test_seeds_may_begin_elsewhere(tmp_path, capsys):
    words = ["compare", "digits", "--methods", "none", "--seeds", "2", "--no-cost", *options()]
    out = tmp_path / "c"
    assert cli.main([*words, "--first-seed", "7", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.glob("runs/none/*")) == ["seed-7", "seed-8"]
    assert "--first-seed 7" in (out / "table.md").read_text()
    with pytest.raises(SystemExit):
        cli.main([*words, "--first-seed", "-1", "--out", str(out)])
    assert "--first-seed: must be a whole number from 0 to" in capsys.readouterr().err


def test_timeless_keeps_the_rest():
    assert timeless({"seconds": 1, "ratio_low": 2, "a": {"seconds_total": 1, "b": 2}}) == {
        "a": {"b": 2}
    }
