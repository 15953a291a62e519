"""What a comparison's directory becomes: rows, Markdown, CSV, the terminal, and errors."""

import csv
import io
import json
import random
import re
import shutil
from dataclasses import replace

import comparisons
import pytest

from seht import cli
from seht.lab import report
from seht.lab.paper import preset
from seht.lab.report import figures
from seht.lab.report.columns import curvature
from seht.lab.report.load import load
from seht.lab.report.rows import build, options_of, split
from seht.lab.report.stats import seeds_needed
from seht.lab.report.table import comma_separated, markdown
from seht.lab.report.words import brief, command, lead


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return comparisons.comparison(tmp_path_factory.mktemp("digits"))


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def rows_of(text):
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


def table_of(directory):
    """The CSV's rows, without writing anything: figures take their time."""
    return rows_of(comma_separated(build(load(directory))))


def run(*arguments):
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return error.code


def test_csv_has_every_method_once_with_means_of_the_runs(copy):
    rows = table_of(copy)
    assert list(rows) == comparisons.METHODS
    found = []
    for seed in range(3):
        file = comparisons.folder(copy, "mixup", seed) / "result.json"
        found.append(json.loads(file.read_text())["metrics"]["last"]["test_top1"])
    assert float(rows["mixup"]["last_test_top1"]) == pytest.approx(sum(found) / 3)
    assert rows["mixup"]["n"] == rows["mixup"]["asked"] == "3"
    baseline, other = rows["weight-decay"], rows["sam"]
    assert baseline["difference_last_test_top1"] == ""
    gain = float(other["last_test_top1"]) - float(baseline["last_test_top1"])
    assert float(other["difference_last_test_top1"]) == pytest.approx(gain)
    low, high = float(other["difference_low"]), float(other["difference_high"])
    assert low < gain < high and gain == pytest.approx((low + high) / 2)


def test_only_columns_of_time_depend_on_the_machine(copy):
    """Another machine has other times, and nothing else; the names of columns say which."""
    before = table_of(copy)
    for file in copy.glob("runs/*/*/result.json"):
        comparisons.write_json(file, {**json.loads(file.read_text()), "seconds": 1e4})
    costs = {method: {"ratio": 7.0, "low": 6.0, "high": 8.0} for method in comparisons.METHODS}
    comparisons.write_json(copy / "cost.json", costs)
    after = table_of(copy)
    changed = {k for method in before for k, v in before[method].items() if after[method][k] != v}
    assert changed and all(name.startswith(("seconds", "ratio")) for name in changed)


def test_no_file_tells_where_it_was_written(copy):
    report.write(copy)
    for name in ("table.csv", "table.md", "report.html"):
        text = (copy / name).read_text()
        assert str(copy) not in text and str(copy.parent) not in text


def test_writing_twice_gives_the_same_bytes(copy):
    files = report.write(copy)
    before = {name: file.read_bytes() for name, file in files.items()}
    assert report.write(copy) == files
    assert {name: file.read_bytes() for name, file in files.items()} == before
    assert set(before) == {"table.md", "table.csv", "report.html"}
    assert not list(copy.glob(".*")) and not list(copy.glob("*.part"))


def test_markdown_has_one_line_for_a_method_and_marks_the_best(copy):
    text = report.write(copy)["table.md"].read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(lines) == len(comparisons.METHODS)
    assert len({line.count("|") for line in lines}) == 1
    (best,) = (line for line in lines if re.search(r"^\| `[^`]+` \| \*\*", line))
    assert "seht-d(probes=10,prob=0.05)+label-smoothing" in best
    assert "seht compare digits --methods" in text and "--seeds 3" in text


def test_runs_that_are_not_done_are_listed_and_not_counted(copy):
    reason = "the training loss is not finite at step 12"
    comparisons.failed(copy, "mixup", 1, reason)
    (comparisons.folder(copy, "sam", 2) / "result.json").unlink()
    shutil.rmtree(comparisons.folder(copy, "label-smoothing", 0))
    files = report.write(copy)
    rows = rows_of(files["table.csv"].read_text())
    assert [rows[m]["n"] for m in ("mixup", "sam", "label-smoothing")] == ["2", "2", "2"]
    for text in (files["table.md"].read_text(), files["report.html"].read_text()):
        assert f"failed: {reason}" in text
        assert "unfinished: 12 epochs done" in text and "not started" in text
        assert re.search(r"test accuracy (is best is not decided )?so far", text)
        assert "2 of 3" in text


def test_the_best_method_is_not_named_without_its_runs_that_failed(copy):
    """Its mean is over those that ended, perhaps the easier seeds."""
    comparisons.failed(copy, "seht-d(probes=10,prob=0.05)+label-smoothing", 1, "diverged")
    assert "% without 1 run of it that failed" in lead(build(load(copy)))


def test_a_comparison_that_has_just_begun(tmp_path):
    comparisons.comparison(tmp_path, seeds=1, costs=False)
    shutil.rmtree(tmp_path / "runs")
    files = report.write(tmp_path)
    assert "No run is done yet." in files["report.html"].read_text()
    assert [row["n"] for row in rows_of(files["table.csv"].read_text()).values()] == ["0"] * 6
    report.show(tmp_path)


def test_one_seed_has_no_errors_and_no_intervals(tmp_path):
    comparisons.comparison(tmp_path, seeds=1)
    rows = table_of(tmp_path)
    assert rows["sam"]["last_test_top1"] and not rows["sam"]["last_test_top1_stderr"]
    assert rows["sam"]["difference_last_test_top1"] and not rows["sam"]["difference_low"]
    assert rows["sam"]["trace_stderr"] == "2.5"  # that of the estimate


def test_text_reports_perplexity_at_the_best_epoch_and_less_is_better(tmp_path):
    comparisons.comparison(tmp_path, text=True)
    table = build(load(tmp_path))
    assert table.compared == "best_test_perplexity"
    best = min(table.rows, key=lambda row: row.figures["best_test_perplexity"].value)
    assert table.ranked("best_test_perplexity")[0] == best.method
    rows = table_of(tmp_path)
    values = float(rows["sam"]["best_test_perplexity"]), float(rows["sam"]["last_test_perplexity"])
    assert values[1] == pytest.approx(values[0] + 1)
    assert "valid perplexity" in markdown(table)


@pytest.mark.parametrize(
    ("eigenvalues", "stability", "verdict"),
    [
        ({"largest": 35.2, "smallest": -0.7}, {"stable": False}, "not stable"),
        ({"largest": [35.2, 9.0], "smallest": [-0.7]}, {"verdict": "unstable"}, "unstable"),
    ],
    ids=["single", "several"],
)
def test_eigenvalues_appear_when_they_are_there(made, tmp_path, eigenvalues, stability, verdict):
    assert "eigenvalue" not in markdown(build(load(made)))
    methods = ["weight-decay", "sam"]
    more = {"eigenvalues": eigenvalues, "stability": stability}
    comparisons.comparison(tmp_path, methods, seeds=2, more=more)
    row, table = table_of(tmp_path)["sam"], build(load(tmp_path))
    assert float(row["largest_eigenvalue"]) == pytest.approx(35.2)
    assert float(row["smallest_eigenvalue"]) == pytest.approx(-0.7)
    assert row["stability"] == verdict
    assert "largest eigenvalue" in markdown(table) and "section 3.4" in markdown(table)


def test_eigenvalues_that_were_not_found_are_bounds(tmp_path):
    ends = {"largest": 35.2, "largest_residual": 1e-5, "smallest": -0.7, "smallest_residual": 0.2}
    stability = {"verdict": "unstable", "equilibrium": True}
    more = {"eigenvalues": {**ends, "converged": False}, "stability": stability}
    comparisons.comparison(tmp_path, ["weight-decay", "sam"], seeds=2, more=more)
    found = comparisons.folder(tmp_path, "weight-decay", 0) / "result.json"
    other = json.loads(found.read_text())
    other["eigenvalues"]["converged"] = True
    other["stability"]["equilibrium"] = False
    comparisons.write_json(found, other)
    lines = {line.split("`")[1]: line for line in markdown(build(load(tmp_path))).splitlines()
             if line.startswith("| `")}  # fmt: skip
    assert "| 35.2 | ≤ −0.700 | partly downward (settled) |" in lines["sam"]
    assert "| ≤ −0.700 | partly downward (settled: 1 of 2) |" in lines["weight-decay"]
    assert "--spectrum allows more" in markdown(build(load(tmp_path)))
    row = table_of(tmp_path)["sam"]
    assert row["eigenvalue_bounds"] == "smallest" and row["equilibria"] == "2"


def test_curvature_in_words():
    assert curvature("marginal (2), unstable (1)") == "partly flat (2), partly downward (1)"
    assert curvature("stable") == "upward" and curvature(None) == ""
    assert curvature("not stable") == "not stable"


# --- what the data decide ---------------------------------------------------------------------


def with_gains(top, gains, seeds=5, spread=0.2):
    """A comparison in which a method's figures are the baseline's, plus a gain, plus chance."""
    comparisons.comparison(top, list(gains), seeds=seeds, costs=False)
    for method, gain in gains.items():
        for seed in range(seeds):
            file = comparisons.folder(top, method, seed) / "result.json"
            found = json.loads(file.read_text())
            luck = random.Random(seed).gauss(0, 3) + random.Random(f"{method}{seed}").gauss(
                0, spread
            )
            found["metrics"]["last"]["test_top1"] = 60 + gain + luck
            comparisons.write_json(file, found)
    return build(load(top))


def test_a_best_method_is_named_where_the_data_decide(tmp_path):
    table = with_gains(tmp_path, {"weight-decay": 0, "mixup": 3, "sam": 9, "none": -4})
    assert [row.method for row in table.leaders()] == ["sam"]
    said = lead(table)
    assert said.startswith("The best test accuracy is that of sam, ")
    assert "2 are better than weight-decay and 1 worse" in said and "Holm" in said
    assert {row.method: row.verdict for row in table.rows} == {
        "weight-decay": "", "mixup": "better", "sam": "better", "none": "worse",
    }  # fmt: skip
    assert "* |" in markdown(table)


def test_no_best_is_named_where_they_do_not(tmp_path):
    table = with_gains(tmp_path, {"weight-decay": 0, "mixup": 0.02, "sam": 0.01, "none": -8})
    assert {row.method for row in table.leaders()} == {"weight-decay", "mixup", "sam"}
    said = lead(table)
    assert said.startswith("Which test accuracy is best is not decided: these seeds do not tell ")
    assert "The best" not in said and "none are better than weight-decay and 1 worse" in said


@pytest.mark.parametrize(
    ("gain", "words"), [(9, "is better"), (-9, "is worse"), (0.01, "is neither better nor worse")]
)
def test_a_single_other_method_is_named(tmp_path, gain, words):
    said = lead(with_gains(tmp_path, {"weight-decay": 0, "sam": gain}))
    assert said.endswith(f". sam {words} than weight-decay (paired t-test at 5 %).")


def test_one_seed_decides_nothing(tmp_path):
    table = with_gains(tmp_path, {"weight-decay": 0, "sam": 20}, seeds=1)
    assert len(table.leaders()) == 2 and "not decided" in lead(table)


def test_an_interval_without_zero_is_not_enough_among_many(tmp_path):
    """One of fourteen would be called by itself."""
    gains = {"weight-decay": 0, **{f"seht-h(weight={i})": 1.4 * (i == 1) for i in range(1, 15)}}
    table = with_gains(tmp_path, gains, spread=0.5)
    alone = [
        row for row in table.rows if row.difference and row.difference.low * row.difference.high > 0
    ]
    assert alone and not [row for row in table.rows if row.verdict]
    row = table_of(tmp_path)[alone[0].method]
    assert float(row["difference_p"]) < 0.05 <= float(row["difference_p_holm"])


def test_how_many_seeds_a_difference_needs(tmp_path, capsys):
    with_gains(tmp_path, {"weight-decay": 0, "sam": 9, "mixup": 3}, spread=2.0)
    assert run("report", str(tmp_path), "--power", "1.0") == 0
    assert "seeds for" in capsys.readouterr().out
    rows = rows_of((tmp_path / "table.csv").read_text())
    needed = build(load(tmp_path), 1.0).rows[1]
    assert int(rows[needed.method]["power_seeds"]) == needed.needed > 5
    assert needed.needed == seeds_needed(1.0, needed.difference.spread, 2)
    assert "seeds for a gap of 1" in (tmp_path / "table.md").read_text()
    assert run("report", str(tmp_path), "--power", "0") == 2
    assert "--power: must be a finite number above 0, not '0'" in capsys.readouterr().err


def test_what_a_method_cost_with_its_search(copy):
    comparisons.write_json(copy / "grid.json", {"runs": {"weight-decay": 7, "sam": 3, "other": 9}})
    rows, table = table_of(copy), build(load(copy))
    ratio = float(rows["sam"]["ratio"])
    assert float(rows["sam"]["ratio_with_search"]) == pytest.approx(4 * ratio)
    assert rows["sam"]["search_runs"] == "3" and rows["mixup"]["search_runs"] == ""
    assert float(rows["weight-decay"]["ratio_with_search"]) == 8.0
    assert "with search" in markdown(table)
    titles = [panel.title for panel in figures.flatness(table)]
    assert "Test accuracy against compute" in titles


def test_no_band_is_cut_off():
    import matplotlib.pyplot as plt

    curves = [figures.Curve([1, 2, 3], [1.0, 2.0, 3.0], [30.0, 52.0, 55.0], [2.0, 9.0, 4.0])]
    for curve, highest in ((curves[0], 61.0), (replace(curves[0], error=[0, 60.0, 0]), 100.0)):
        drawing, axes = plt.subplots()
        figures._lines([curve], "epoch", "valid_top1", 1.0)(axes)
        assert highest <= axes.get_ylim()[1] <= 101
        plt.close(drawing)


def test_a_choice_at_the_edge_of_its_candidates_is_named(copy):
    assert "edge of the search" not in markdown(build(load(copy)))
    edges = {"sam": "rho", "other": "eps", "mixup": 3}
    comparisons.write_json(copy / "grid.json", {"edges": edges})
    assert "edge of the search: sam (rho): the smallest or largest" in markdown(build(load(copy)))


def test_the_command_names_seeds_that_begin_elsewhere(tmp_path):
    comparisons.comparison(tmp_path, ["weight-decay"], seeds=1)
    asked = json.loads((tmp_path / "comparison.json").read_text())
    comparisons.write_json(tmp_path / "comparison.json", {**asked, "seeds": [7, 8]})
    assert "--seeds 2 --first-seed 7" in command(load(tmp_path))


@pytest.mark.parametrize("small", [False, True])
def test_the_command_of_rows_that_change_the_recipe_is_their_preset(tmp_path, small):
    """No text of a method says what `optim.lr=0.1` does to the recipe: it could not be repeated."""
    name = "wikitext2-gru-small" if small else "wikitext2-gru"
    methods = [f"{row.method}@{row.changed}" for row in preset("dropout-gru").rows]
    assert methods[1] == "weight-decay@model.dropout=0.1"
    about = comparisons.recipe(name=name, data="wikitext2")
    comparisons.comparison(tmp_path, methods, seeds=1, text=True, about=about)
    said = command(load(tmp_path))
    assert said.startswith(f"seht compare --preset dropout-gru {'--small ' * small}--seeds 1 ")
    assert "--methods" not in said


def test_the_methods_of_this_library_come_last(tmp_path):
    methods = ["weight-decay", "weight-decay+seht-h", "mixup", "seht-h"]
    comparisons.comparison(tmp_path, methods, seeds=1)
    table = build(load(tmp_path))
    found = ["weight-decay", "mixup", "weight-decay+seht-h", "seht-h"]
    assert [row.method for row in table.rows] == found
    assert table.comparison.baseline == "weight-decay"


def test_the_paper_stands_beside_us_where_the_recipe_is_its_own(tmp_path):
    methods = ["weight-decay", "mixup(alpha=0.2)", "seht-d(prob=0.01,probes=1)", "seht-h"]
    settings = {"seht-h": {"weight": 0.001, "probes": 5}, "seht-d": {"weight": 0.001}}
    about = comparisons.recipe("cifar10", "cifar10", paper="table1", settings=settings)
    comparisons.comparison(tmp_path, methods, seeds=2, about=about)
    files = report.write(tmp_path)
    rows = rows_of(files["table.csv"].read_text())
    assert rows["weight-decay"]["paper_test_top1"] == "94.0"
    assert rows["seht-d(prob=0.01,probes=1)"]["paper_test_top1"] == "95.37"
    assert rows["seht-h"]["paper_test_top1"] == "95.59"
    assert rows["mixup(alpha=0.2)"]["paper_test_top1"] == ""  # the paper has another alpha
    page = files["report.html"].read_text()
    assert "MM + FRL" in page and "95.33 ± 0.12 †" in page and "arXiv 2208.05924" in page
    assert "belong to its own recipe" in page  # this one has another network
    assert rows.keys() == set(methods)  # quoted rows are no methods of ours


def test_terminal_prints_whole_columns_that_fit(copy, capsys, monkeypatch):
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("FORCE_COLOR", "1")
        report.show(copy)
        out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        table = out.splitlines()[:-1]
        assert all(len(line) <= width for line in table) and "…" not in out
        assert "95.76 ± 0.22" in out and "[" in out
        assert ("weight norm" in out) == (width == 200)


def test_method_texts():
    text = "seht-d(probes=10,prob=0.05)+label-smoothing"
    assert split(text) == [("seht-d", "probes=10,prob=0.05"), ("label-smoothing", "")]
    settings = {"seht-d": {"weight": 0.1, "probes": 1}}
    found = options_of(text, {"settings": settings})
    assert found["seht-d"] == {"weight": 0.1, "probes": 10, "prob": 0.05}
    assert split("weight-decay [optim.lr=20]") == [("weight-decay [optim.lr=20]", "")]


# --- the command ------------------------------------------------------------------------------


def test_command_writes_shows_and_names_the_page(copy, capsys):
    assert run("report", str(copy)) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(copy / "report.html") and "weight-decay" in out
    assert (copy / "report.html").is_file() and (copy / "table.csv").is_file()


def broken(copy, how):
    """Damage a directory; returns what to give to the command."""
    result = comparisons.folder(copy, "sam", 0) / "result.json"
    if how == "nowhere":
        return copy / "nothing"
    if how == "foreign":
        (copy / "comparison.json").unlink()
    elif how == "cut":
        result.write_text(result.read_text()[:100])
    elif how == "nameless":
        comparisons.write_json(result, {"status": "done"})
    elif how == "empty":
        comparisons.write_json(result, {"status": "done", "method": "sam", "seed": 0})
    elif how == "binary":
        result.write_bytes(b"\xff\xfe\x00")
    elif how == "list":
        (copy / "comparison.json").write_text("[1, 2]")
    elif how == "incomplete":
        (copy / "comparison.json").write_text('{"recipe": {"name": "digits"}}')
    elif how == "cost":
        (copy / "cost.json").write_text('{"sam": 1.5}')
    elif how == "metrics":
        (result.parent / "metrics.csv").write_text("epoch,train_loss\n1,cheese\n")
    elif how == "unwritable":
        (copy / "report.html").mkdir()  # permissions would not stop a root user
    return copy


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nowhere", "there is no directory"),
        ("foreign", "not a comparison: it has no comparison.json"),
        ("cut", r"result.json cannot be read \(.*\); .* remove it"),
        ("nameless", "result.json is not a result of this version of seht"),
        ("empty", "result.json is not a result of this version of seht"),
        ("binary", r"result.json cannot be read \("),
        ("list", r"comparison.json cannot be read \(it is not a JSON object\)"),
        ("incomplete", "does not name a recipe"),
        ("cost", "not a table of costs"),
        ("metrics", "metrics.csv' is not a table of numbers"),
        ("unwritable", "cannot write .*report.html"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(copy, how, message, capsys):
    where = broken(copy, how)
    assert run("report", str(where)) == 2
    out, err = capsys.readouterr()
    assert not out and re.search(message, err) and len(err.splitlines()) == 1
    assert not list(copy.glob(".*")), "nothing half-written stays"


def test_a_metrics_row_that_is_being_written_is_left_out(copy):
    file = comparisons.folder(copy, "sam", 0) / "metrics.csv"
    file.write_text(file.read_text() + "13,260,4")
    assert len(load(copy).runs["sam", 0].curves["train_loss"]) == 12
    report.write(copy)


@pytest.mark.parametrize("curve", [False, True])
def test_it_says_how_often_the_test_set_is_read(tmp_path, curve):
    about = {**comparisons.recipe(), "curve": curve}
    comparisons.comparison(tmp_path, ["weight-decay", "sam"], seeds=1, about=about)
    said = markdown(build(load(tmp_path)))
    assert ("is read once, at the end of a run." in said) != curve
    assert ("after every epoch for the figure alone." in said) == curve


def test_power_without_a_spread_and_beyond_all_seeds(tmp_path):
    comparisons.comparison(tmp_path / "one", ["weight-decay", "sam"], seeds=1)
    table = build(load(tmp_path / "one"), 1.0)
    assert "two seeds or more" in brief(table) and "seeds for" not in markdown(table)
    comparisons.comparison(tmp_path / "many", ["weight-decay", "sam"], seeds=3)
    table = build(load(tmp_path / "many"), 1e-6)
    assert "> 100,000" in markdown(table) and "two seeds or more" not in brief(table)
