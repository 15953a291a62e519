"""The page in headless Chromium, at the width of a phone and of a desktop, light and dark."""

import json
import os
import shutil
from pathlib import Path

import chromium
import comparisons
import pytest

from seht.lab import report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.find() is None, reason="no Chromium; `make test-browser` gets it"),
]
PHONE, DESKTOP, WIDE = 390, 1280, 1920
REAL = Path(__file__).parents[2] / "results" / "cifar10-low"
MANY = [
    *("weight-decay", "none", "linbreg", "jacobian", "dropblock", "confidence-penalty", "cutout"),
    *("mixup", "sam", "dropout", "htr-full", "htr-middle", "lookahead", "nso", "fisher", "seht-h"),
    "seht-d(probes=10,prob=0.05)+label-smoothing",
    "seht-h(curvature=ggn,weight=0.001,warmup=500,every=4)",
]


@pytest.fixture(scope="module")
def browser():
    running = chromium.Chromium()
    yield running
    running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    top = tmp_path_factory.mktemp("pages")
    settings = {"seht-d": {"weight": 0.001, "probes": 10, "prob": 0.05}}
    about = comparisons.recipe("cifar10", "cifar10", paper="table1", settings=settings)
    more = {"eigenvalues": {"largest": 35.2, "smallest": -0.7}, "stability": {"verdict": "stable"}}
    comparisons.comparison(top / "images", MANY, seeds=2, about=about, more=more)
    kinds = ("8bit", "4bit", "3bit", "noise1", "noise3", "noise10")
    for file in (top / "images").glob("runs/*/*/result.json"):
        found = json.loads(file.read_text())
        found["metrics"]["last"] |= {"test_ece": 4.0 + found["seed"]}
        found["metrics"]["last"] |= {f"test_top1_{kind}": 91.3 + found["seed"] for kind in kinds}
        for kind in kinds[3:]:
            found["metrics"]["last"] |= {
                f"train_rise_{kind}": 0.01234 + found["seed"] / 1000,
                f"train_rise_{kind}_predicted": 0.01 + found["seed"] / 900,
            }
        comparisons.write_json(file, found)
    reason = "the training loss is not finite at step 12"
    comparisons.failed(top / "images", "mixup", 1, reason)
    comparisons.comparison(top / "text", text=True)
    shutil.unpack_archive(REAL / "records.tar.xz", top / "real", filter="data")
    return {name: report.write(top / name)["report.html"] for name in ("images", "text", "real")}


@pytest.fixture(params=["images", "text"])
def page(request, pages):
    return pages[request.param]


@pytest.fixture(params=[PHONE, DESKTOP])
def width(request):
    return request.param


# What a reader can see: the element's own box, cut by every ancestor that clips or scrolls.
VISIBLE = """
(selector => [...document.querySelectorAll(selector)].map(element => {
  const box = element.getBoundingClientRect();
  return [box.left, box.right, box.width, box.height, element.textContent.trim()];
}))"""


def test_nothing_is_fetched_and_nothing_complains(browser, page, width):
    browser.open(page, width=width)
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.run("document.styleSheets[0].cssRules.length") > 50


def test_the_page_itself_never_scrolls_sideways(browser, page, width):
    browser.open(page, width=width)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") == width
    wide = browser.run(f"{VISIBLE}('h1, h2, p, figure, dt, dd, pre, label, .scroll')")
    assert len(wide) > 30
    assert [box for box in wide if box[0] < 0 or box[1] > width + 0.5] == []


@pytest.mark.parametrize("wide", [DESKTOP, WIDE])
@pytest.mark.parametrize("name", ["images", "text", "real"])
def test_desktop_shows_every_column_of_every_table(browser, pages, name, wide):
    browser.open(pages[name], width=wide)
    hidden = "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
    found = browser.run(hidden)
    assert len(found) >= 2 and not any(found)
    right = browser.run("document.querySelector('.scroll').getBoundingClientRect().right")
    cells = browser.run(f"{VISIBLE}('table th, table td')")
    assert len(cells) > 40 and all(cell[0] >= 0 and cell[1] <= right + 0.5 for cell in cells)
    heads = [" ".join(cell[4].split()) for cell in browser.run(f"{VISIBLE}('thead th')")]
    assert "training loss" in heads and ("smallest eigenvalue" in heads) == (name != "text")
    assert heads.count("by the trace") == (3 if name == "images" else 0)


def test_a_phone_says_that_a_table_goes_on(browser, page, width):
    browser.open(page, width=width)
    hints = [box[3] for box in browser.run(f"{VISIBLE}('.swipe')")]
    tables = browser.run("document.querySelectorAll('.scroll').length")
    assert len(hints) == tables >= 2 and all((height > 0) == (width == PHONE) for height in hints)
    shade = "getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert browser.run(shade) == "local, local, scroll, scroll"


def test_phone_shows_name_result_and_difference_without_scrolling(browser, page):
    browser.open(page, width=PHONE)
    names = browser.run(f"{VISIBLE}('.scroll tbody th')")
    assert all(left >= 0 and right <= PHONE for left, right, *_ in names)
    columns = "document.querySelector('.scroll thead tr').children.length - 1"
    cells = browser.run(f"{VISIBLE}('.scroll:first-of-type tbody td')")
    number = browser.run(columns)
    tables = browser.run("document.querySelectorAll('.scroll').length")
    found = [cells[i : i + number] for i in range(0, len(names) // tables * number, number)]
    order = 2 if "perplexity" not in browser.run("document.body.textContent") else 3
    for row in found:
        for left, right, *_ in row[: order if order == 2 else 2]:
            assert left >= 0 and right <= PHONE


def test_a_row_names_its_method_while_it_is_scrolled_on_a_phone(browser, pages):
    browser.open(pages["images"], width=PHONE)
    for scrolled in (0, 150, 300):
        browser.run(f"document.querySelector('.scroll').scrollLeft = {scrolled}")
        assert browser.run("document.querySelector('.scroll').scrollLeft") == scrolled
        names = browser.run(f"{VISIBLE}('.scroll tbody th')")
        assert all(15 <= left <= 17 for left, *_ in names[: len(MANY)])


def test_heads_stand_over_their_columns(browser, page, width):
    browser.open(page, width=width)
    script = """
    [...document.querySelectorAll('.scroll table')].map(table => {
      const edges = row => [...row.querySelectorAll('td, thead th:not(:first-child)')]
        .map(cell => cell.getBoundingClientRect()).map(box => [box.left, box.right]);
      return [edges(table.tHead), ...[...table.tBodies[0].rows].map(edges)];
    })"""
    for head, *rows in browser.run(script):
        for row in rows:
            assert len(row) == len(head)
            for ours, theirs in zip(row, head, strict=True):
                assert ours == pytest.approx(theirs, abs=1.5)


def test_no_text_overlaps_in_a_head(browser, page, width):
    browser.open(page, width=width)
    script = """
    [...document.querySelectorAll('.scroll thead th')].filter(e => e.offsetWidth).map(cell => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return [cell.textContent, range.getBoundingClientRect().right,
              cell.getBoundingClientRect().right];
    })"""
    assert [c for c in browser.run(script) if c[1] > c[2] + 0.5] == []


def test_text_is_large_enough_to_read(browser, page, width):
    browser.open(page, width=width)
    script = """
    [...document.querySelectorAll('body *')]
      .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()))
      .filter(e => !e.closest('title, details'))
      .map(e => {
        const svg = e.closest('svg');
        const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
        return [scale * parseFloat(getComputedStyle(e).fontSize), e.textContent];
      })"""
    sizes = browser.run(script)
    assert len(sizes) > 100
    assert [found for found in sizes if found[0] < 9.5] == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast_in_light_and_dark(browser, page, dark):
    """At least 4.5 to 1 for every text, as WCAG 2 asks for."""
    browser.open(page, width=DESKTOP, dark=dark)
    script = """
    (() => {
      const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
      const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = e => {
        for (; e; e = e.parentElement) {
          const c = numbers(getComputedStyle(e).backgroundColor);
          if (c.length == 3 || c[3] == 1) return c;
        }
      };
      return [...document.querySelectorAll('body *')]
        .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()))
        .filter(e => !e.closest('title'))
        .map(e => {
          const style = getComputedStyle(e);
          const text = numbers(e.closest('svg') ? style.fill : style.color);
          const [a, b] = [light(text), light(behind(e))].sort((x, y) => y - x);
          return [(a + 0.05) / (b + 0.05), e.textContent];
        });
    })()"""
    found = browser.run(script)
    assert len(found) > 100
    assert [item for item in found if not item[0] >= 4.5] == []
    page_is_dark = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, page_is_dark[4:-1].split(","))) < 150) == dark


def test_the_legend_brings_a_method_forward(browser, pages):
    browser.open(pages["images"], width=DESKTOP)
    colour = "getComputedStyle(document.querySelector('.line-2 path')).stroke"
    band = "getComputedStyle(document.querySelector('.band-2')).display"
    before = browser.run(colour)
    assert not browser.run("document.getElementById('pick-2').checked")
    assert browser.run(band) == "none"
    browser.run("document.getElementById('pick-2').click()")
    assert browser.run(colour) != before and browser.run(band) != "none"
    faint = browser.run("[...document.querySelectorAll('.legend input:checked')].length")
    assert faint == 7  # six until the reader picks others


def test_figures_are_drawn(browser, page, width):
    browser.open(page, width=width)
    boxes = browser.run(f"{VISIBLE}('figure svg')")
    assert len(boxes) == 8
    assert all(box[2] > 300 and box[3] > 150 for box in boxes)
    lines = browser.run("document.querySelectorAll('figure .line path').length")
    assert lines >= 8 * len(browser.run(f"{VISIBLE}('.legend label')"))


def test_screenshots_can_be_kept(browser, page, width, tmp_path):
    """`SEHT_SCREENSHOTS=DIR make test-browser` leaves them there to look at."""
    where = Path(os.environ.get("SEHT_SCREENSHOTS") or tmp_path)
    where.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        browser.open(page, width=width, dark=dark)
        file = where / f"{page.parent.name}-{width}{'-dark' if dark else ''}.png"
        browser.screenshot(file)
        assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 20_000
