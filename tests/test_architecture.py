"""The house: every part of the package imports only what lies below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import seht

ROOT = Path(seht.__file__).parent

ORDER = (
    *("errors", "extras"),
    *("tensors", "guards", "probes", "estimators", "record", "task"),
    *("operators", "persample", "precision", "curvature", "replay", "distributed", "engines"),
    *("strength", "account", "functional", "penalty", "check", "measure", "doctor", "integrations"),
    *("__init__", "commands", "lab", "cli", "__main__"),
)
"""The parts of the package, lowest first. ``__init__`` gathers the public names."""

FOLDERS = [part for part in ORDER if (ROOT / part).is_dir()]

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""Imports that go upwards, and why they are still there: only ever fewer."""


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of every import of ours, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "seht":
                    yield alias.name.removeprefix("seht").lstrip(".") or "__init__", ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full names"
            if (node.module or "").split(".")[0] != "seht":
                continue
            module = (node.module or "").removeprefix("seht").lstrip(".")
            for alias in node.names:
                if module:
                    yield module, alias.name
                else:
                    yield alias.name if alias.name in ORDER else "__init__", ""


@cache
def _imports() -> list[tuple[str, str, str]]:
    return [
        (_module(path), module, name)
        for path in sorted(ROOT.rglob("*.py"))
        for module, name in _imported(path)
    ]


def _upward() -> set[tuple[str, str]]:
    found = set()
    for who, what, _ in _imports():
        mine, other = who.split(".")[0], what.split(".")[0]
        if mine != other and ORDER.index(other) >= ORDER.index(mine):
            found.add((who, what))
    return found


def test_every_part_has_its_place() -> None:
    parts = {p.stem for p in ROOT.glob("*.py")} | {
        p.parent.name for p in ROOT.glob("*/__init__.py")
    }
    assert parts == set(ORDER)


def test_nobody_imports_upwards() -> None:
    assert _upward() - EXCEPTIONS.keys() == set()


def test_exceptions_only_shrink() -> None:
    assert EXCEPTIONS.keys() - _upward() == set(), "mended: take it off the list"
    assert len(EXCEPTIONS) <= 0


def test_the_library_never_imports_the_lab() -> None:
    users = {who for who, what, _ in _imports() if what.split(".")[0] == "lab"}
    outside = {who for who in users if who.split(".")[0] not in ("lab", "cli")}
    assert outside == set()


def test_measure_and_check_take_engines_by_their_interface() -> None:
    for who, what, name in _imports():
        if who.split(".")[0] in ("measure", "check") and what.split(".")[0] == "engines":
            assert what == "engines", f"{who} reaches into {what}; use what seht.engines exports"
            assert name in seht.engines.__all__, (who, name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_who_it_is(folder: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text("utf-8")))
    assert text and len(text.splitlines()) >= 2, f"{folder}/__init__.py: what lives here, for whom?"
