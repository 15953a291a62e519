"""docs/support.md says what the tests declare, no more and no less."""

import pytest
import support
from support import BOTH, EMPTY, NOT_RUN, PAGE, REFUSED, WORKS, Cell
from support_plugin import COMPLETE, DECLARED

REMEDY = "run `make matrix`"


def files(states):
    return set(states["tests"].split(", "))


def test_the_page_is_in_step(request):
    """With a part of the tests collected: these; with all of them: the page has nothing else."""
    config = request.config
    wanted = support.table((cell, True) for cell in config.stash[DECLARED])
    page = support.parse(PAGE.read_text(encoding="utf-8"))
    complete = config.stash[COMPLETE]
    for key, states in wanted.items():
        assert key in page, f"{key} is not on the page: {REMEDY}"
        assert files(states) <= files(page[key]), f"{key}: {REMEDY}"
        for column, state in states.items():
            shown = page[key][column]
            if column == "tests" or shown in (NOT_RUN, state):
                continue
            assert not complete and state in (EMPTY, *shown.split(" / ")), f"{key}: {REMEDY}"
    if complete:
        assert page.keys() == wanted.keys(), f"rows without a test: {REMEDY}"
        assert all(files(page[key]) == files(wanted[key]) for key in page), REMEDY


class Item:
    """What a collected test shows of itself."""

    def __init__(self, *marks, **params):
        self.marks, self.path = marks, support.TESTS / "engines" / "test_x.py"
        if params:
            self.callspec = type("Spec", (), {"params": params})

    def iter_markers(self, name):
        return [mark.mark for mark in self.marks if mark.mark.name == name]


supports, FILE = pytest.mark.supports, "engines/test_x.py"


def test_marks():
    mark = supports("DDP")
    assert support.declared(Item(mark, engine="autograd")) == [
        Cell("features", "DDP", "autograd", WORKS, FILE)
    ]
    both = Item(supports("{x.imag}", engine=("difference", "autograd"), cell="refused"), x=1j)
    assert [cell[1:4] for cell in support.declared(both)] == [
        ("1.0", "difference", REFUSED),
        ("1.0", "autograd", REFUSED),
    ]
    lean = Item(supports("a", engine="{form}"), form="lean")
    assert support.declared(lean)[0].column == "difference"
    assert support.declared(Item(supports("{x}", engine="autograd"), x="")) == []


def test_marks_that_are_none():
    for mark in (
        supports("a", engine="b"),
        supports("a", engine="autograd", cell="green"),
        supports("a", engine="SEHT-S"),
    ):
        with pytest.raises(ValueError, match="supports:"):
            support.declared(Item(mark))
    for mark in (supports("a"), supports("a", engine="autograd", section="b")):
        with pytest.raises(KeyError):
            support.declared(Item(mark))


def cell(row, column, kind=WORKS, ran=True):
    return Cell("features", row, column, kind, FILE), ran


def test_a_cell_is_green_by_a_test_that_ran():
    found = support.table(
        [
            cell("a", "difference"), cell("a", "difference", ran=False),
            cell("a", "autograd", ran=False), cell("b", "difference", REFUSED),
            cell("c", "difference", REFUSED), cell("c", "difference"),
        ]
    )  # fmt: skip
    states = {row: (s["difference"], s["autograd"]) for (_, row), s in found.items()}
    assert states == {
        "a": (WORKS, NOT_RUN), "b": (REFUSED, EMPTY), "c": (BOTH, EMPTY),
    }  # fmt: skip
    assert support.parse(support.render(found, "a test")) == found


# --- in a pytest of its own -------------------------------------------------------------------

INNER = """
import pytest
@pytest.mark.supports("works", engine="difference")
def test_a(): pass
@pytest.mark.supports("skipped", engine="difference")
def test_b(): pytest.skip()
@pytest.mark.slow
@pytest.mark.supports("refused", engine="autograd", cell="refused")
def test_c(): assert OUTCOME
def test_d(): assert False, "not marked"
"""


@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("processes", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_the_whole_way(pytester, monkeypatch, outcome, processes):
    """The page is written if all went well, and is left alone otherwise."""
    tests = pytester.mkdir("tests")
    (tests / "test_inner.py").write_text(INNER.replace("OUTCOME", str(outcome)))
    (tests / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(support.TESTS / 'kit')!r})\n"
        "import pathlib, support; support.TESTS = pathlib.Path(__file__).parent\n"
        "pytest_plugins = ['support_plugin']\n"
    )
    markers = "markers = supports: x\n  slow: x\n"
    pytester.makefile(".ini", pytest=f"[pytest]\ntestpaths = tests\n{markers}")
    page = pytester.path / "page.md"
    page.write_text("old")
    result = pytester.runpytest_subprocess("-m", "supports", "--matrix=page.md", "-n", processes)
    if not outcome:
        assert result.ret != 0 and page.read_text() == "old"
        result.stderr.fnmatch_lines(["*page.md is not written*"])
        return
    assert result.ret == 0
    found = support.parse(page.read_text(encoding="utf-8"))
    assert {row: (s["difference"], s["autograd"]) for (_, row), s in found.items()} == {
        "works": (WORKS, EMPTY),
        "skipped": (NOT_RUN, EMPTY),
        "refused": (EMPTY, REFUSED),
    }
    page.write_text("old")
    part = pytester.runpytest_subprocess("-m", "supports", "-k", "test_a", "--matrix=page.md")
    assert part.ret != 0 and page.read_text() == "old"
