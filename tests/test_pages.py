"""Every Python block of the documentation runs, and every link of a page leads somewhere."""

import importlib
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pages
import pytest
import torch

import seht
from seht.cli import build_parser
from seht.integrations import log_values, training
from seht.lab.methods import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if pages.blocks(path.read_text("utf-8")))
NEEDS = {"lightning.md": "lightning", "huggingface.md": "peft"}
"""What a page imports and not every Python has."""


@pytest.fixture
def alone():
    """A group of one process, for pages of several."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_runs(page, request, tmp_path, monkeypatch):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
        pytest.importorskip("transformers" if page.name == "huggingface.md" else "lightning")
    text = page.read_text("utf-8")
    if "DistributedDataParallel(" in text or "fully_shard(" in text:
        request.getfixturevalue("alone")
    monkeypatch.chdir(tmp_path)
    known = dict(METHODS)
    try:
        pages.run(text, str(page))
    finally:  # a page shows how to add one
        METHODS.clear()
        METHODS.update(known)


EVERY = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]


@pytest.mark.parametrize("page", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_block_is_passed_over(page):
    """Python stands in fences that the tests find, and what is typed into a shell exists."""
    text = page.read_text("utf-8")
    rest = pages.BLOCK.sub("", text)
    said = re.findall(r"^[ \t]*```(.+)$", text, re.MULTILINE)
    assert set(said) <= {"python", "py"}, said  # `py` says on the page why it cannot run
    assert len(pages.blocks(text)) == said.count("python")
    assert "seht." not in "".join(re.findall(r"^    \w+ = .*$", rest, re.M))
    for block in re.findall(r"^```\n(.*?)^```", rest, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            try_command(shlex.split(line, comments=True))


def try_command(words):
    """It names what there is; nothing is run."""
    if words[:1] == ["seht"]:
        arguments, rest = build_parser().parse_known_args(words[1:])
        assert getattr(arguments, "extras", False) or not rest, words
    elif words[:1] == ["make"]:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[:2] == ["pip", "install"]:
        asked = re.findall(r"seht\[([a-z,]+)\]", " ".join(words))
        for extra in ",".join(asked).split(",") if asked else ():
            assert re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


FUNCTIONS = [
    (f"{home.__name__}.{name}", getattr(home, name))
    for home in (seht, seht.measure)
    for name in home.__all__
    if callable(getattr(home, name)) and not isinstance(getattr(home, name), types.ModuleType)
]
FUNCTIONS.append(("seht.integrations.log_values", log_values))
FUNCTIONS.append(("seht.integrations.training", training))
RECORDS = (Exception, seht.measure.results.PlainResult, seht.measure.Layer, seht.measure.Progress)
"""Things that a user is given: they need no example."""
GIVEN = (seht.StepRecord, seht.CheckReport, seht.DoctorReport, seht.Estimator, seht.measure.Tracked)


@pytest.mark.parametrize(("name", "thing"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_a_docstring_has_an_example_that_runs(name, thing, capsys):
    text = textwrap.dedent(inspect.getdoc(thing))
    said = textwrap.dedent("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    found = pages.blocks(said)
    if isinstance(thing, type) and (issubclass(thing, RECORDS) or thing in GIVEN):
        return
    assert found, f"{name} has no example"
    assert ":math:" not in text and "code-block" not in text
    pages.run(said, name)


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        ("lightning", "lightning", "SehtCallback"),
        ("transformers", "huggingface", "SehtMixin"),
        ("transformers", "huggingface", "SehtTrainer"),
    ],
)
def test_an_adapters_docstring_has_an_example_that_runs(
    package, module, name, tmp_path, monkeypatch, capsys
):
    pytest.importorskip(package)
    if package == "transformers":
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    adapter = getattr(importlib.import_module(f"seht.integrations.{module}"), name)
    test_a_docstring_has_an_example_that_runs(name, adapter, capsys)


def links(path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    return [target for target in found if "://" not in target]


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), *ROOT.glob("*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    """Also in the repository, where nobody builds the site."""
    for target in links(page):
        assert (page.parent / target).exists(), target


def test_every_public_name_is_in_the_reference():
    said = "".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)", said, re.MULTILINE))
    names = {f"seht.{name}" for name in seht.__all__ if name != "measure"}
    names |= {f"seht.measure.{name}" for name in seht.measure.__all__}
    assert names - listed == set()


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    """No broken link, no page that is missing, and nothing that is fetched from elsewhere."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        html = page.read_text("utf-8")
        assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=.?https?:", html), page
