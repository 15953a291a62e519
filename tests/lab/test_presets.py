"""Presets: every row can be parsed, built and trained on its recipe; the paper's rows are there."""

import pytest

from seht.lab.methods.parse import parse
from seht.lab.paper import PRESETS, preset
from seht.lab.recipes import RECIPES, override, recipe

CASES = [(name, small) for name in PRESETS for small in (False, True)]


@pytest.mark.parametrize("name, small", [case for case in CASES if case != ("demo", True)])
def test_every_row_is_a_method_that_fits_its_recipe(name, small):
    chosen = preset(name, small)
    assert chosen.name == name and chosen.help
    base = recipe(chosen.recipe)
    assert base.name.endswith("-small") == small
    for row in chosen.rows:
        spec = parse(row.method)
        changed = override(base, row.changes)
        spec.build(changed)  # raises for a method that does not fit
    assert chosen.rows[0].method.startswith("weight-decay")  # the baseline
    keys = [(parse(r.method).text, tuple(r.changes.items())) for r in chosen.rows]
    assert len(set(keys)) == len(keys)


def options(text):
    (part,) = parse(text).parts.items()
    return part


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table4"])
def test_the_tables_settings_are_their_recipes(name):
    """What a row leaves to the recipe and what it says itself are the same for the same method."""
    chosen = preset(name)
    base = recipe(chosen.recipe)
    assert base.paper == name
    for row in chosen.rows:
        method, given = options(row.method)
        if "weight" in given and method in base.settings:
            assert given["weight"] == base.settings[method]["weight"]


RIVALS = ["confidence-penalty", "label-smoothing", "cutout", "mixup"]
QUOTED = ["none", "htr-middle", "lookahead"]  # in the paper; ours are trained


def test_the_rows_of_the_tables():
    names = lambda name: [options(row.method)[0] for row in preset(name).rows]
    ours = ["seht-d", "seht-d", "seht-d", "seht-h"]
    assert names("table1") == ["weight-decay", "jacobian", "dropblock", *RIVALS, *QUOTED, *ours]
    rows = [options(row.method) for row in preset("table1").rows]
    seht = [o for m, o in rows if m.startswith("seht")]
    pairs = [(o["probes"], o.get("prob")) for o in seht]
    assert pairs == [(1, 0.01), (10, 0.01), (10, 0.05), (5, None)]
    assert names("table2") == ["weight-decay", *RIVALS, "seht-d", "seht-d"]
    for text in ("table3", "table4"):
        assert names(text) == ["weight-decay", *RIVALS[:2], "seht-d"]


def test_the_grids():
    grid = [options(row.method) for row in preset("weight-cifar10").rows]
    for method in ("seht-h", "seht-d"):
        assert [o["weight"] for m, o in grid if m == method] == [1e-4, 1e-3, 1e-2, 1e-1]
    for method in ("confidence-penalty", "label-smoothing"):
        assert [o["weight"] for m, o in grid if m == method] == [1e-3, 5e-3, 1e-2, 5e-2, 1e-1]
    draws = [options(row.method) for row in preset("probes-prob").rows]
    pairs = [o for m, o in draws if m == "seht-d"]
    assert {(o["probes"], o["prob"]) for o in pairs} == {
        (k, p) for k in (1, 5, 10) for p in (0.01, 0.05)
    }
    base = recipe("wikitext2-lstm")
    rates = [override(base, row.changes).optim.lr for row in preset("lr-lstm").rows]
    assert rates == [0.001, 0.01, 0.1, 0.5, 1, 10, 20, 40]
    drops = [override(base, row.changes).model.dropout for row in preset("dropout-gru").rows]
    assert drops == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    dropped = preset("with-dropout")
    for row in dropped.rows[1:]:
        made = parse(row.method).build(recipe(dropped.recipe)).configure(recipe(dropped.recipe))
        assert made.model.dropout == 0.3


def test_unknown_preset():
    with pytest.raises(ValueError, match="unknown preset 'table5'; did you mean 'table"):
        preset("table5")
    assert all(f"{p.recipe}-small" in RECIPES for p in PRESETS.values() if p.name != "demo")
