"""The site as a reader opens it: from a file, on a desk and on a phone, by day and by night."""

import html
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import chromium
import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["index", "getting-started", "support", "reference/penalty", "notebooks/how-flat"]

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if chromium.find() is None:
        pytest.skip("no Chromium")
    pytest.importorskip("material")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return place


@pytest.fixture(scope="module")
def browser(site):
    opened = chromium.Chromium()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def night(site):
    """A browser of its own: the theme remembers day or night from page to page."""
    opened = chromium.Chromium()
    yield opened
    opened.close()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk", "phone"])
def test_a_page_fits_and_asks_nobody(site, browser, night, page, width, dark):
    browser = night if dark else browser
    browser.open(site / f"{page}.html", width=width, dark=dark)
    assert all(url.startswith(("file:", "data:")) for url in browser.requests())
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.fonts.size") == 0  # the reader's own
    scheme = browser.run("document.body.getAttribute('data-md-color-scheme')")
    assert scheme == ("slate" if dark else "default")


def test_no_link_is_broken(site):
    """Files and places on pages, as they were built; 404.html is for a server."""
    links = re.compile(r'(?:href|src)=(?:"([^"]*)"|([^\s">]+))')
    pages = {
        path: path.read_text("utf-8") for path in site.rglob("*.html") if path.name != "404.html"
    }
    places = {
        page: set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', text)) for page, text in pages.items()
    }
    broken, seen = [], 0
    for page, text in pages.items():
        for match in links.finditer(text):
            url = urlsplit(html.unescape(match[1] or match[2] or ""))
            if url.scheme:
                continue
            seen += 1
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            there = target.is_file()
            if there and url.fragment and target in places:
                there = unquote(url.fragment) in places[target]
            if not there:
                broken.append((page.name, url.geturl()))
    assert seen > 2000 and broken == []


def test_search_works_without_a_server(site, browser):
    browser.open(site / "index.html", width=1280)
    browser.run(
        "(() => { document.querySelector('#__search').click();"
        "const q = document.querySelector('[data-md-component=search-query]'); q.focus();"
        "q.value = 'quantisation'; q.dispatchEvent(new Event('keyup', {bubbles: true})); })()"
    )
    found = []
    for _ in range(100):
        found = browser.run(
            "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        )
        if found:
            break
        time.sleep(0.1)
    assert any("quantisation.html" in link for link in found), found
