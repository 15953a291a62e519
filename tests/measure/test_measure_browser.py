"""The page in headless Chromium: it fits, it asks for nothing, it shows what it should."""

import chromium
import pytest
import torch
from curved_problems import data, loss_fn, network
from torch import nn

from seht.commands.measure import report
from seht.measure.survey import PARTS, Subject, SurveyPlan

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "flat.html"
    batch = data()
    linear = nn.Linear(5, 3).double()
    subjects = [
        Subject("plain", network(), loss_fn, batch),
        Subject("smooth <b>bold</b>", network(nn.Tanh), loss_fn, batch),
        Subject("a-linear-model-with-a-name-that-goes-on-and-on-and-on", linear, loss_fn, batch),
    ]
    torch.manual_seed(0)
    plan = SurveyPlan(PARTS, few=48, points=9)
    report(subjects, plan, "seht measure ...", html_file=str(file))
    return file


@pytest.fixture(scope="module")
def browser():
    if chromium.find() is None:
        pytest.skip("there is no Chromium here")
    browser = chromium.Chromium()
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [1280, 1920])
def test_every_column_is_in_sight(browser, page, width):
    browser.open(page, width=width)
    boxes = browser.run(
        "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])"
    )
    assert boxes and all(whole <= shown for whole, shown in boxes)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page(browser, page, width, dark, tmp_path):
    browser.open(page, width=width, dark=dark)
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('figure svg').length") == 10
    # Every drawing has a size, and its text is large enough to be read.
    sizes = browser.run(
        "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().height)"
    )
    assert min(sizes) > 60
    text = browser.run(
        "Math.min(...[...document.querySelectorAll('figure svg text')]"
        ".map(t => t.getBoundingClientRect().height))"
    )
    assert text > 7
    # Names are text, not markup.
    assert browser.run("document.querySelectorAll('main b').length") == 0
    assert "smooth <b>bold</b>" in browser.run("document.body.innerText")
    # Colours come from the page's sheet: none is left from the drawing.
    assert "#0300" not in page.read_text() and "#010101" not in page.read_text()
    shades = browser.run(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (sum(map(int, shades[0][4:-1].split(","))) > 380) is dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
