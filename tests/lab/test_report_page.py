"""The page as text: self-contained, well formed, complete, safe from what a record may contain."""

import html.parser
import json
import re

import comparisons
import pytest

from seht import WeightPath
from seht.lab import report
from seht.lab.records import RunError
from seht.lab.report import figures
from seht.lab.report.load import load
from seht.lab.report.page import drawn_interval, drawn_reach, render
from seht.lab.report.rows import build

VOID = {"meta", "link", "input", "br"}


class Outline(html.parser.HTMLParser):
    """Every tag closed by its own, ids once; collects addresses that would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.fetched, self.tags = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "srcset", "data") and not value.startswith(("#", "data:")):
                self.fetched.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module", params=["image", "text"])
def directory(request, tmp_path_factory):
    where = tmp_path_factory.mktemp(request.param)
    return comparisons.comparison(where, text=request.param == "text")


@pytest.fixture(scope="module")
def page(directory):
    return report.write(directory)["report.html"].read_text()


def test_well_formed_and_self_contained(page):
    outline = Outline(page)
    assert len(outline.ids) == len(set(outline.ids))
    assert not outline.fetched and "script" not in outline.tags
    assert outline.tags.count("style") == 1  # one in a drawing would hold for the whole page
    assert not re.search(r"@import|url\((?!#)", page)
    assert not re.search(r"https?://", page)


def test_every_reference_inside_a_figure_has_its_target(page):
    wanted = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert {a or b for a, b in wanted} <= ids and wanted


def test_it_holds_what_a_reader_asks_for(page, directory):
    for method in comparisons.METHODS:
        assert method in page
    for words in ("cost\nratio", "trace", "weight norm", "difference to", "[95 %]", "±"):
        assert words in page
    for words in ("seht compare", "--seeds 3", "torch 2.13.0", "model.width", "How to read it"):
        assert words in page
    last = "Validation perplexity" if "text" in directory.name else "Validation accuracy"
    for what in ("Training loss", "Validation loss", last):
        for axis in ("epoch", "wall-clock"):
            assert f"{what} against {axis}" in page


def test_placeholder_colours_are_all_replaced(page):
    assert not re.search(r"#0[123][0-9a-f]{4}\b", page)
    for number in range(len(comparisons.METHODS)):
        assert f"stroke: var(--m{number})" in page


def test_a_record_cannot_inject(tmp_path):
    comparisons.comparison(tmp_path, ["weight-decay", "sam"], seeds=2)
    comparisons.failed(tmp_path, "sam", 1, '<script>alert(1)</script> & "quotes"')
    page = report.write(tmp_path)["report.html"].read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    Outline(page)


def test_figures_survive_what_is_not_finite_or_missing(tmp_path):
    comparisons.comparison(tmp_path, ["weight-decay", "sam", "seht-h"], seeds=1)
    where = comparisons.folder(tmp_path, "sam", 0)
    (where / "metrics.csv").write_text("epoch,train_loss,valid_loss\n1,nan,inf\n2,inf,\n")
    found = json.loads((where / "result.json").read_text())
    found["trace"]["estimate"] = -3.0
    comparisons.write_json(where / "result.json", found)
    (comparisons.folder(tmp_path, "seht-h", 0) / "metrics.csv").unlink()
    table = build(load(tmp_path))
    assert figures.convergence(table)[0].title == "Training loss against epoch"
    assert len(figures.flatness(table)) == 2
    Outline(report.write(tmp_path)["report.html"].read_text())


def test_one_epoch_and_no_validation(tmp_path):
    comparisons.comparison(tmp_path, ["weight-decay"], seeds=1, costs=False)
    where = comparisons.folder(tmp_path, "weight-decay", 0)
    (where / "metrics.csv").write_text("epoch,step,seconds,lr,train_loss\n1,20,1.5,0.1,0.7\n")
    titles = [figure.title for figure in figures.convergence(build(load(tmp_path)))]
    assert titles == ["Training loss against epoch", "Training loss against wall-clock"]
    report.write(tmp_path)


def test_curves_are_means_over_seeds(tmp_path):
    comparisons.comparison(tmp_path, ["weight-decay"], seeds=2)
    for seed, values in enumerate([(4.0, 2.0), (2.0, 1.0)]):
        lines = [f"{epoch},{10 * (seed + 1) * epoch},{v}" for epoch, v in enumerate(values, 1)]
        file = comparisons.folder(tmp_path, "weight-decay", seed) / "metrics.csv"
        file.write_text("\n".join(["epoch,seconds,train_loss", *lines]) + "\n")
    found = figures.curve(load(tmp_path).of("weight-decay"), "train_loss")
    assert found.mean == [3.0, 1.5] and found.seconds == [15.0, 30.0]
    assert found.error == [1.0, 0.5] and found.epoch == [1.0, 2.0]


@pytest.mark.parametrize("where", ["result.json", "config.json"])
def test_a_tuned_weight_is_drawn(tmp_path, where):
    """Found in the run, or (--refit) gone again along the path that its settings hold."""
    methods = ["weight-decay", "seht-h(weight=tuned)", "seht-d(weight=tuned)"]
    comparisons.comparison(tmp_path, methods, seeds=2)
    for seed, last in enumerate((1e-3, 4e-3)):
        file = comparisons.folder(tmp_path, methods[1], seed) / where
        path = WeightPath((0.25, 1.0), (1e-4, last)).state()
        comparisons.write_json(file, json.loads(file.read_text()) | {"paths": {"seht-h": path}})
    panel = figures.convergence(build(load(tmp_path)))[-1]
    assert panel.title == "Tuned weight against epoch"
    assert panel.svg.count('class="line line-') == 1 and "the tuned weight, before" in panel.svg
    found = figures.tuned_weight(load(tmp_path).of(methods[1]))
    assert (found.epoch[0], found.epoch[-1]) == (3.0, 12.0) and found.error[0] == 0
    assert (found.mean[0], found.mean[-1]) == pytest.approx((1e-4, 2e-3))
    assert found.error[-1] == pytest.approx(1.5e-3)
    assert "Tuned weight against epoch" in render(build(load(tmp_path)))
    broken = json.loads(file.read_text()) | {"paths": {"seht-h": {"format": "seht.WeightPath/9"}}}
    comparisons.write_json(file, broken)
    with pytest.raises(RunError, match=r"no path of weights.*delete it"):
        load(tmp_path)


def test_an_interval_that_goes_on_has_an_arrow(tmp_path):
    """One method gone astray does not shrink the others' intervals to dots."""
    comparisons.comparison(tmp_path, seeds=3)
    for seed, top1 in enumerate((10.0, 11.0, 80.0)):
        where = comparisons.folder(tmp_path, "sam", seed)
        found = json.loads((where / "result.json").read_text())
        found["metrics"]["last"]["test_top1"] = top1
        comparisons.write_json(where / "result.json", found)
    table = build(load(tmp_path))
    drawn = {row.method: drawn_interval(row, drawn_reach(table.rows)) for row in table.rows}
    assert drawn["weight-decay"] is None
    assert drawn["sam"].beyond == "left right" and drawn["sam"].low == 4.0
    assert not drawn["mixup"].beyond and drawn["mixup"].width > 3
    assert '<i class="left right"' in render(table)
