"""The pages of docs/evidence: what the tables say of made-up records, and that ours are drawn."""

import math
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(STUDIES))

import answers  # noqa: E402
import draw  # noqa: E402
import figures  # noqa: E402
import paper  # noqa: E402
import run as study  # noqa: E402


def runs(*values):
    return {
        str(2000 + k): {"failed": "diverged"}
        if value is None
        else {"last": {"test_top1": value, "test_loss": 1.0, "test_ece": 5.0}, "seconds": 1.0}
        for k, value in enumerate(values)
    }


def stage(rows, *, refit=False, searched=None, cost=None):
    return {
        "rows": {key: key.replace(" ", "-") for key in rows},
        "runs": rows,
        "refit": refit,
        "classes": 10,
        "begun": "2026-01-01T00:00:00+00:00",
        "versions": {"seht": "0"},
        "cost": cost or {},
        "searched": searched or {},
        "candidates": [],
        "command": "seht compare",
    }


def record(**stages):
    machine = {"processor": "a processor", "cores": 2, "commit": "0000000"}
    return {"task": "digits-noisy", "machine": machine, "seeds": 4, "stages": stages}


SEARCHED = stage(
    {
        "weight decay": runs(70, 72, 71, 73),
        "sam": runs(74, 75.5, 75, 76),
        "tr(G)": runs(80, 81, 82, 82.5),
    },
    searched={"weight decay": 15, "sam": 15, "tr(G)": 15},
)


def test_one_seed_makes_a_table_and_decides_nothing():
    found = record(fixed=stage({"weight decay": runs(70), "tr(G)": runs(80), "sam": runs(60)}))
    text = draw.table(found)
    assert "| tr(G) | `tr(G)` | 1 | 80.0 | +10.0 |" in text and "| 60.0 | −10.0 |" in text
    assert len(answers.verdicts({"cifar10-large-noisy": found}).splitlines()) == 2


def test_curves_of_one_seed(tmp_path):
    rows = {key: runs(70) for key in ("weight decay", "tr(G)", "tr(G) tuned")}
    for row in rows.values():
        row["2000"]["curves"] = {"valid_top1": [30, 50, 40]}
    found = record(fixed=stage(rows)) | {"task": "cifar10-large-noisy"}
    figures.draw({"cifar10-large-noisy": found}, tmp_path)
    drawn = (tmp_path / "cifar10-large-noisy-curve.svg").read_text()
    assert all(f"<!-- {key} -->" in drawn for key in rows)


def test_a_table_has_every_row_the_best_first_and_marks_what_passes_holm():
    text = draw.table(record(search=SEARCHED))
    order = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert order == ["", "---", "tr(G)", "sam", "weight decay"]
    assert "+9.9 [+8.5, +11.2] *" in text
    assert "71.5 ± 0.6" in text
    assert "make study TASK=digits-noisy" in text


def test_the_answers_are_those_of_the_protocol():
    fixed = stage({"plain": runs(60, 60, 60, 61), "tr(G) tuned": runs(75, 70, 80, 82)})
    text = answers.verdicts({"digits-noisy": record(fixed=fixed, search=SEARCHED)})
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells[:2] == ["`digits-noisy`", "4"]
    assert cells[2].startswith("yes: +9.9")
    assert cells[3].startswith("yes: +6.2") and cells[3].endswith("(sam)")
    assert cells[4] == "no harm"
    assert cells[5].startswith("no: −4.6")
    rivals = {key: dict(list(SEARCHED[key].items())[:2]) for key in ("rows", "runs")}
    assert "price" not in answers.verdicts({"price": record(price=SEARCHED | rivals)})


def test_a_share_that_was_searched_on_the_task_is_not_one_that_was_carried():
    """Question 5 asks after the share of digits-noisy; a row of the same name may have its own."""
    chosen = SEARCHED["rows"] | {"tr(G) share": "seht-h(share=2.0)"}
    both = SEARCHED["runs"] | {"tr(G) share": runs(80, 82.5, 81, 83)}
    first = SEARCHED | {"rows": chosen, "runs": both}
    other = first | {"rows": chosen | {"tr(G) share": "seht-h(share=4.0)"}}
    records = {"digits-noisy": record(search=first), "digits-noisy-20": record(search=other)}
    records["digits-noisy-fitted"] = record(
        search=other,
        carried=stage({"tr(G) share carried": runs(75, 77.5, 76, 78)})
        | {"rows": {"tr(G) share carried": "seht-h(share=2.0)"}},
    )
    lines = answers.verdicts(records).splitlines()[2:]
    fifth = {line.split("|")[1].strip(): line.split("|")[8].strip() for line in lines}
    assert fifth["`digits-noisy`"].startswith("yes: +10.1")
    assert fifth["`digits-noisy-20`"] == ""
    assert fifth["`digits-noisy-fitted`"].startswith("yes: +5.1")


def test_a_row_that_was_not_trained_again_is_not_said_to_be_missing():
    said = draw.missing({"digits-noisy": record(search=SEARCHED)}).splitlines()[0]
    rows, again = said.split("; ")[:2]
    assert "weight decay," not in rows.replace("on weight decay,", "") and "nso" in rows
    assert again == "trained again: weight decay, sam, tr(G), tr(G) share, tr(G) tuned"


def test_the_code_of_rows_that_a_record_has_forgotten_is_said():
    text = draw.about(record(search=SEARCHED) | {"task": "cancer"})
    assert "Code ed386a8, later 0000000;" in text


def test_of_text_less_is_better():
    def text(*values):
        lasts = {"last": {"test_perplexity": 1.0}, "seconds": 1.0}
        return {
            str(2000 + k): lasts | {"best": {"test_perplexity": v}} for k, v in enumerate(values)
        }

    rows = {"plain": text(80, 81, 83), "weight decay": text(70, 72, 71), "sam": text(66, 66, 65)}
    found = record(a=stage(rows | {"tr(G) share": text(60, 61, 62)}))
    cells = answers.verdicts({"gpt-small": found}).splitlines()[-1].split("|")[1:-1]
    assert cells[0].strip() == "`gpt-small`, perplexity"
    assert cells[2].strip().startswith("yes: +10.0 [")
    assert cells[3].strip().startswith("yes: +4.7 [") and cells[3].strip().endswith("(sam)")
    assert cells[4].strip() == ""


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(-3, -0.5, "harm"), (-0.9, 2, "no harm"), (-2, 0.5, "undecided"), (1, 2, "no harm")],
)
def test_harm(low, high, word):
    assert answers._harm(draw.Difference((low + high) / 2, low, high, 5)) == word


def test_rows_of_another_time_stay():
    first = stage({"sam": runs(70), "nso": runs(71)}, searched={"sam": 15})
    both = study.merged(first, {**stage({"sam": runs(70, 72)}), "command": "later"})
    assert set(both["rows"]) == {"sam", "nso"} and len(both["runs"]["sam"]) == 2
    assert both["searched"] == {"sam": 15} and both["command"] == "later"


def test_fewer_seeds_of_a_row_take_none_away_unless_its_setting_is_another():
    first = stage({"sam": runs(70, 72, 74)})
    both = study.merged(first, stage({"sam": runs(60)}))
    assert [run["last"]["test_top1"] for run in both["runs"]["sam"].values()] == [60, 72, 74]
    other = {**stage({"sam": runs(60)}), "rows": {"sam": "sam(rho=0.2)"}}
    assert len(study.merged(first, other)["runs"]["sam"]) == 1


def test_seeds_are_counted_by_row_and_not_by_what_the_last_command_asked_for(tmp_path):
    """Two rows were run again with more seeds; the others, and every pair, have fewer."""
    fixed = stage({"tr(G) tuned": runs(*range(70, 90))})
    longer = {**record(fixed=fixed, search=SEARCHED), "seeds": 20}
    assert "; 4 of 20 seeds are there" in draw.missing({"digits-noisy": longer})
    figures.draw({"digits-noisy": longer}, tmp_path)
    assert "; n = 4 " in (tmp_path / "digits-noisy.svg").read_text()


def test_a_run_that_diverged_has_guessed_and_is_named():
    rows = draw.rows_of(record(a=stage({"sam": runs(70, None)})), refit=False)
    assert rows["sam"].values == {2000: 70, 2001: 10}
    assert "2 (1 diverged)" in draw.table(record(a=stage({"sam": runs(70, None)})))


def test_a_late_start_costs_as_much_less_as_it_is_late():
    early = draw.Row("a", "seht-h(every=2,warmup=0.1)", {}, 10, 0, {"ratio": 2.0})
    late = draw.Row("b", "seht-h(every=2,warmup=0.75)", {}, 10, 0, {"ratio": 1.0})
    rows = {"a": early, "b": late}
    assert math.isclose(draw.plain_steps(early, rows), 1.9)
    assert math.isclose(draw.plain_steps(late, rows), 1.25)


def test_convergence_is_the_first_epoch_with_a_small_loss():
    assert paper.epochs({"curves": {"train_loss": [1.0, 0.3, 0.09, 0.2]}}) == 3
    assert paper.epochs({"curves": {"train_loss": [1.0, 0.3]}}) == 2


def test_the_pages_are_those_that_the_records_give():
    """``make evidence`` would change nothing."""
    names = [*draw.TASKS, "claims"]
    records = {n: study.read_record(n) for n in names if study.path_of(n, study.RECORDS).is_file()}
    for page in draw.DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert draw.redrawn(text, records) == text, f"run `make evidence`: {page.name}"


def test_every_record_has_a_place_on_the_page():
    text = (draw.DOCS / "index.md").read_text(encoding="utf-8")
    for path in study.RECORDS.glob("*.json.xz"):
        name = path.name.removesuffix(".json.xz")
        assert name in ("paper", "claims") or f"<!-- table {name} -->" in text, name


def test_a_place_of_another_script_is_left_alone():
    page = "<!-- table -->\n\ntheirs\n\n<!-- end -->\n"
    assert draw.redrawn(page, {}) == page


def test_judging_began_after_the_protocol_was_written():
    """Its commit is of 04:54 UTC, 18 November 2026."""
    for path in study.RECORDS.glob("*.json.xz"):
        for part in (
            study.read_record(path.name.removesuffix(".json.xz")).get("stages", {}).values()
        ):
            assert part["begun"] > "2026-11-18T04:54"
