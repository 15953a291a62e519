"""The study: its plan against the lab's registry, and a task of seconds from end to end."""

import re
import sys
import warnings
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(STUDIES))

import plan  # noqa: E402
import run as study  # noqa: E402

from seht.lab import recipes  # noqa: E402
from seht.lab.methods.parse import parse  # noqa: E402
from seht.lab.search import expand  # noqa: E402

TINY = ("--epochs", "2", "--data.size", "100", "--data.validation", "20", "--batch", "4")


@pytest.mark.parametrize("name", plan.TASKS)
def test_every_row_is_a_method_of_the_lab_that_fits_the_recipe(name):
    task = plan.TASKS[name]
    recipe = recipes.recipe(task.recipe)
    seen: set[str] = set()
    for stage in task.stages:
        for key, text in stage.rows.items():
            for place in study._PLACE.finditer(text):
                there = seen if place["task"] is None else keys(place["task"])
                assert place["key"] in there, (key, text)
            text = study._PLACE.sub(standing_in, text)
            candidates = expand(text)
            # One budget for all that are searched.
            assert len(candidates) == (5 if stage.grid else 1), text
            for candidate in candidates:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # every=8 is a question of the study
                    parse(candidate).build(recipe)
        seen |= set(stage.rows)


def keys(task):
    return {key for stage in plan.TASKS[task].stages for key in stage.rows}


def standing_in(place):
    """The first candidate of the row that a place names."""
    if place["option"]:
        return "0.01"
    task = plan.TASKS[place["task"] or "digits-noisy"]
    (text,) = [s.rows[place["key"]] for s in task.stages if s.grid and place["key"] in s.rows]
    return expand(text)[0]


def test_the_protocol_names_the_tasks_and_seeds():
    text = (STUDIES.parent / "docs" / "evidence" / "protocol.md").read_text()
    variant = r"(-20|-10|-pair|-long|(?<=finetune)-noisy)?(-carried)?$"
    for name in plan.TASKS:
        assert f"`{re.sub(variant, '', name, count=1)}`" in text, name
    assert f"from {plan.FIRST_SEED} on" in text
    assert "five candidates each" in text


def tiny():
    stages = (
        plan.Stage("fixed", {"plain": "weight-decay", "tr(G) tuned": "seht-h(weight=tuned)"}),
        plan.Stage("search", {"weight decay": "weight-decay(weight=1e-3|1e-2)"}, grid=True),
        plan.Stage("top", {"sam on weight decay": "{weight decay}+sam(rho=0.05)"}),
        plan.Stage("again", {"weight decay": "{weight decay}"}, refit=True),
    )
    return plan.Task("digits-noisy", stages, 2, (*plan.NO_EXTRAS, *TINY), curves=True)


def test_a_task_runs_packs_its_record_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "TASKS", {"tiny": tiny()})
    where = ["--runs", str(tmp_path / "runs"), "--records", str(tmp_path)]
    study.main(["tiny", "--seeds", "1", *where, "--save-every", "60"])
    first = study.read_record("tiny", tmp_path)
    study.main(["tiny", *where])
    assert "1 of 2 runs are done already" in capsys.readouterr().out
    record = study.read_record("tiny", tmp_path)
    rows = study.chosen(record)
    assert re.fullmatch(r"weight-decay\(weight=0\.01?0?1?\)", rows["weight decay"])
    assert rows["sam on weight decay"] == f"{rows['weight decay']}+sam(rho=0.05)"
    plain = record["stages"]["fixed"]["runs"]["plain"]
    assert list(plain) == [str(plan.FIRST_SEED), str(plan.FIRST_SEED + 1)]
    assert plain[str(plan.FIRST_SEED)] == first["stages"]["fixed"]["runs"]["plain"]["2000"]
    assert 0 <= plain["2000"]["last"]["test_top1"] <= 100
    assert len(plain["2000"]["curves"]["train_loss"]) == 2
    assert record["stages"]["fixed"]["runs"]["tr(G) tuned"]["2000"]["weight"] > 0
    assert "--refit" in record["stages"]["again"]["command"]


def test_a_record_grows_by_seeds_without_a_search(tmp_path, monkeypatch, capsys):
    """What the search chose is in the record; the runs that found it may be gone."""
    monkeypatch.setattr(study, "TASKS", {"tiny": tiny()})
    records, first = ["--records", str(tmp_path)], tmp_path / "first"
    study.main(["tiny", "--seeds", "1", "--runs", str(first), *records])
    old = study.read_record("tiny", tmp_path)
    chosen = ["tiny", "--chosen", "--runs", str(tmp_path / "second"), *records]
    study.main([*chosen, "--rows", "plain"])
    capsys.readouterr()
    study.main(chosen)
    said = capsys.readouterr().out
    new = study.read_record("tiny", tmp_path)
    assert "fixed: 1 rows, seeds from 2001" in said  # "plain" has it already
    assert study.chosen(new) == study.chosen(old)
    assert new["seeds"] == 2
    whole = tmp_path / "whole"
    study.main(["tiny", "--runs", str(whole), "--records", str(whole)])
    kept = study.read_record("tiny", whole)
    for name, stage in kept["stages"].items():
        grown = new["stages"][name]
        assert grown["searched"] == stage["searched"]
        assert grown["command"] == old["stages"][name]["command"]
        assert len(grown["candidates"]) == len(stage["candidates"])
        for key, its in stage["runs"].items():
            assert list(grown["runs"][key]) == ["2000", "2001"]
            assert grown["runs"][key]["2001"]["last"] == its["2001"]["last"], (name, key)
    capsys.readouterr()
    study.main(chosen)  # nothing is missing
    assert "==" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="run `make study TASK=tiny` first"):
        study.main(["tiny", "--chosen", "--records", str(tmp_path / "none")])


def test_some_of_the_rows_make_a_smaller_task():
    part = study.only(plan.TASKS["digits-noisy"], ["plain", "sam"])
    assert [(s.name, list(s.rows)) for s in part.stages] == [
        ("fixed", ["plain"]),
        ("search", ["sam"]),
        ("again", ["sam"]),
    ]
    with pytest.raises(SystemExit, match="no row 'sma'"):
        study.only(plan.TASKS["digits-noisy"], ["sma"])


def test_a_choice_that_is_missing_is_said(tmp_path):
    with pytest.raises(SystemExit, match="make study TASK=digits-noisy"):
        study.filled("{digits-noisy:tr(G)}", {}, tmp_path)
    with pytest.raises(SystemExit, match="no row 'sam'"):
        study.filled("{sam}", {"nso": "nso"}, tmp_path)


def test_a_place_takes_a_method_or_one_of_its_options(tmp_path):
    own = {"tr(G)": "seht-h(weight=0.003)"}
    assert study.filled("{tr(G)}+sam", own, tmp_path) == "seht-h(weight=0.003)+sam"
    assert study.filled("seht-s(weight={tr(G)=weight})", own, tmp_path) == "seht-s(weight=0.003)"


def test_unknown_tasks_are_refused(capsys):
    with pytest.raises(SystemExit):
        study.main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err
