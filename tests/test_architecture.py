"""The house: every part of the package imports only what lies below it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import seht

ROOT = Path(seht.__file__).parent

ORDER = (
    *("errors", "extras"),
    *("tensors", "probes", "estimators", "record", "task"),
    *("operators", "persample", "precision", "curvature", "replay", "distributed", "engines"),
    *("strength", "account", "course", "functional", "penalty"),
    *("check", "measure", "doctor", "integrations"),
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


def test_one_class_per_name() -> None:
    places: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


NOT_OURS = {
    "check/sandbox.py": "a weight's .grad",
    "cli.py": "argparse's names",
    "commands/measure.py": "argparse's names",
    "commands/outputs.py": "how warnings are shown",
    "curvature/head_losses.py": "ctx of an autograd.Function",
    "curvature/head_rules.py": "ctx of an autograd.Function",
    "curvature/unformed.py": "ctx; a child of the same class",
    "distributed/detour.py": "DDP's flag, put back",
    "distributed/shards.py": "FSDP2's state",
    "doctor/cost.py": "a weight's .grad",
    "lab/bench/cases.py": "parts of a module",
    "lab/report/__init__.py": "rich's console",
    "measure/data.py": "a copy of the same class",
    "measure/keep.py": "a module's training mode, a weight's .grad",
    "measure/page/figures.py": "matplotlib's axes",
    "operators/bits.py": "ctx of an autograd.Function",
    "operators/constants.py": "a tensor's data",
    "operators/register.py": "a function made here",
    "operators/rules.py": "a function made here",
    "persample/products.py": "ctx of an autograd.Function",
    "replay/checkpoints.py": "a hook of torch.utils.checkpoint",
    "replay/replayer.py": "a copy of the same class",
    "strength/held_out.py": "a module's training mode",
    "tensors/deferred.py": "ctx of an autograd.Function",
    "tensors/gradients.py": "ctx of an autograd.Function",
    "tensors/process.py": "the process itself, and what puts it back",
    "tensors/random_state.py": "a copy of the same class",
    "tensors/undo.py": "a weight's .grad",
}
"""Files that assign to what is not ours to construct, and what that is."""


def test_no_object_is_assigned_to_from_outside() -> None:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found[name] = f"{node.lineno}: {ast.unparse(node)}"
    assert {n: what for n, what in found.items() if n not in NOT_OURS} == {}
    assert NOT_OURS.keys() - found.keys() == set(), "mended: take it off the list"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_who_it_is(folder: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text("utf-8")))
    assert text and len(text.splitlines()) >= 2, f"{folder}/__init__.py: what lives here, for whom?"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_names_what_is_there(folder: str) -> None:
    module = importlib.import_module(f"seht.{folder}")
    for word in re.findall(r"``([a-z_]+(?:/[a-z_]*)*(?:\.py)?)``", module.__doc__ or ""):
        file = word if word.endswith(("/", ".py")) else f"{word}.py"
        homes = (ROOT / folder / file, ROOT / file, ROOT / folder / word, ROOT / word)
        assert any(map(Path.exists, homes)) or hasattr(module, word), f"{folder}: {word} is gone"
