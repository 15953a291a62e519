"""The paper's tables: complete, consistent with the presets, and matched to methods with care."""

import pytest

from seht.lab.paper import TABLES, preset
from seht.lab.recipes import recipe, to_dict
from seht.lab.report.rows import options_of

EXPERIMENTS = {
    "table1": "cifar10",
    "table2": "cifar100",
    "table3": "wikitext2-lstm",
    "table4": "wikitext2-gru",
}


def texts(name):
    """A preset's methods."""
    return [row.method for row in preset(name).rows]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_preset_finds_its_row_in_the_paper(name):
    settings = to_dict(recipe(EXPERIMENTS[name]))
    assert settings["paper"] == name
    rows = [TABLES[name].find(options_of(text, settings)) for text in texts(name)]
    assert None not in rows
    assert len({row.label for row in rows}) == len(rows)
    missing = [row.label for row in TABLES[name].rows if row not in rows]
    dropped = [row.label for row in TABLES[name].rows if not row.printed]
    assert missing == (["MM + FRL"] if name == "table1" else dropped)


def test_rows_with_dropout_find_theirs():
    settings = to_dict(recipe("cifar100"))
    found = [TABLES["table2"].find(options_of(t, settings)) for t in texts("with-dropout")]
    labels = [row.label if row else None for row in found]
    assert labels == [
        "Baseline",
        "Dropout",
        "Confidence Penalty + Dropout",
        "Label Smoothing + Dropout",
        None,
        None,
        "SEHT-D (maxIter=1, prob=0.01) + Dropout",
        None,
    ]


@pytest.mark.parametrize(
    "method",
    [
        "seht-h(curvature=ggn)",
        "seht-h(weight=0.01)",
        "seht-d(prob=0.02)",
        "mixup(alpha=0.5)",
        "label-smoothing+mixup",
        "sam",
    ],
)
def test_another_setting_is_another_method(method):
    assert TABLES["table1"].find(options_of(method, to_dict(recipe("cifar10")))) is None


def test_an_option_that_several_rows_leave_open_finds_none():
    assert TABLES["table1"].find({"seht-d": {"prob": 0.01}}) is None


def test_errors_and_best_rows_as_printed():
    """The rows that the paper prints in bold are the best of its own columns, but for table 3."""
    bold = {
        ("table1", "test_top1", max): "SEHT-H (maxIter=5)",
        ("table2", "test_top1", max): "SEHT-D (maxIter=1, prob=0.05)",
        ("table2", "test_top5", max): "SEHT-D (maxIter=1, prob=0.01)",
        ("table3", "valid_perplexity", min): "Label Smoothing",
        ("table3", "test_perplexity", min): "SEHT-D (maxIter=1, prob=0.05)",
        ("table4", "valid_perplexity", min): "SEHT-D (maxIter=1, prob=0.01)",
        ("table4", "test_perplexity", min): "SEHT-D (maxIter=1, prob=0.01)",
    }
    for (name, key, best), label in bold.items():
        row = best(TABLES[name].rows, key=lambda row: row.figures[key][0])
        assert row.label == label
