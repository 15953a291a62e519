"""The doctor's page in headless Chromium: it fits, and it asks for nothing."""

import chromium
import patients
import pytest

import seht
from seht.doctor.page import render

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "doctor.html"
    report = seht.doctor(*patients.memorising(), budget=5)
    file.write_text(render(report, "seht doctor <b>bold</b>", [("seht", "0")]))
    return file


@pytest.fixture(scope="module")
def browser():
    if chromium.find() is None:
        pytest.skip("there is no Chromium here")
    browser = chromium.Chromium()
    yield browser
    browser.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('figure svg').length") == 2
    assert browser.run("document.querySelectorAll('main b').length") == 0
    boxes = browser.run(
        "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])"
    )
    assert len(boxes) == 3 and (width < 600 or all(whole <= shown for whole, shown in boxes))
    assert "#0300" not in page.read_text() and "#010101" not in page.read_text()
