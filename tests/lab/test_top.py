"""Rows on top of the best weight decay: searched second, with what was found first."""

import json
from argparse import Namespace

import pytest
from small import FEW

from seht import cli
from seht.lab.commands.compare import more
from seht.lab.methods.parse import parse
from seht.lab.recipes import recipe
from seht.lab.search import candidates

SMALL = {**FEW, "epochs": "2", "spectrum": "0", "robustness": "false"}
WORDS = [word for name, value in SMALL.items() for word in (f"--{name}", value)]


def compare(out, methods, *words):
    arguments = ["compare", "digits", "--methods", methods, "--seeds", "1", "--no-cost", *WORDS]
    return cli.main([*arguments, "--out", str(out), *words])


def test_the_method_is_searched_on_top_of_the_decay_that_won(tmp_path):
    out = tmp_path / "c"
    methods = "weight-decay(weight=best)+sam(rho=0.05|0.1),weight-decay(weight=1e-4|100)"
    assert compare(out, methods, "--grid") == 0
    grid = json.loads((out / "grid.json").read_text())
    chosen = [row["method"] for row in grid["candidates"] if row["chosen"]]
    assert chosen[0] == "weight-decay(weight=0.0001)"  # 100 cannot learn anything
    assert next(iter(parse(chosen[1]).parts.items())) == ("weight-decay", {"weight": 0.0001})
    tried = [row["method"] for row in grid["candidates"][2:]]
    assert tried == [f"weight-decay(weight=0.0001)+sam(rho={rho})" for rho in (0.05, 0.1)]
    # Its price is its own search and the one before it.
    assert grid["runs"] == {chosen[0]: 2, chosen[1]: 4}
    asked = json.loads((out / "comparison.json").read_text())
    assert asked["methods"] == [chosen[1], chosen[0]]  # in the order that was asked for


def test_a_row_that_comes_out_twice_is_judged_once(tmp_path):
    out = tmp_path / "c"
    methods = "weight-decay(weight=1e-4|100),weight-decay(weight=best)+mixup(alpha=1.0)"
    assert compare(out, f"{methods},weight-decay(weight=1e-4)+mixup(alpha=1.0)", "--grid") == 0
    asked = json.loads((out / "comparison.json").read_text())
    assert len(asked["methods"]) == 2


def test_best_belongs_to_a_search(tmp_path, capsys):
    assert compare(tmp_path / "c", "weight-decay(weight=best)+sam") == 2
    assert "search with --grid" in capsys.readouterr().err


@pytest.mark.parametrize("others", ["", ",sam(rho=0.1)", ",weight-decay+mixup"])
def test_best_is_a_row_s_of_the_same_search(tmp_path, capsys, others):
    """Without one the recipe's own weight decay would pass for the best."""
    assert compare(tmp_path / "c", f"weight-decay(weight=best)+sam{others}", "--grid") == 2
    said = capsys.readouterr().err
    assert "add weight-decay to --methods" in said and said.count("\n") == 1
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["digits", "digits-noisy", "gpt-small", "cancer-noisy"])
def test_what_a_search_compares_by_default_can_be_built(name):
    made = recipe(name)
    texts = more(made)
    assert "seht-h(curvature=ggn,weight=tuned)" in texts
    assert sum(text.startswith("weight-decay(weight=best)+") for text in texts) == 2
    for text in texts:
        found = candidates(text, made)
        assert len(found) == (1 if "tuned" in text else 7)
        for candidate in found:
            parse(candidate).build(made)


def test_the_default_list_has_them():
    from seht.lab.commands.compare import rows_of

    asked = Namespace(recipe="digits-noisy", methods=None, preset=None, small=False)
    asked.grid, asked.budget, asked.rest, asked.data_dir = True, 2, [], None
    made, found = rows_of(asked)
    names = [row[0].name for row in found]
    assert names[0].startswith("weight-decay(")
    assert [row[0].over_decay for row in found].count(True) == 2
    assert not made.settings.get("weight-decay")
