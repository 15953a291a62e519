"""Without an extra a command says in one line which one to install."""

import ast
import re
import sys
from pathlib import Path

import bare
import comparisons
import pytest

import seht
from seht import extras

SOURCE = Path(seht.__file__).parent
MINE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)

def data():
    return torch.randn(8, 4), torch.arange(8) % 3

def example():
    return model(), lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]), data()
"""
OWN = ["measure", "--model", "mine:model", "--data", "mine:data"]


@pytest.fixture
def place(tmp_path):
    where = tmp_path / "place"
    where.mkdir()
    (where / "mine.py").write_text(MINE)
    return where


def everything():
    return {name for names in extras.PACKAGES.values() for name in names}


def there(place):
    return {file for file in place.rglob("*") if "__pycache__" not in file.parts}


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train", "digits"], "lab"),
        (["compare", "digits"], "lab"),
        (["compare", "--preset", "table1", "--small"], "lab"),
        (["compare", "digits", "--engine", "ray"], "lab"),
        (["report", "compared"], "lab"),
        (["bench", "--fast", "--plot", "plot.png"], "lab"),
        ([*OWN, "--what", "eigenvalues"], "measure"),
        ([*OWN, "--html", "page.html"], "measure"),
        ([*OWN, "--what", "all"], "measure"),
        (["doctor", "mine:example", "--html", "page.html"], "measure"),
        (["measure", "compared/runs/mixup/seed-0"], "lab"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_command_names_the_extra_it_needs(place, arguments, extra):
    comparisons.comparison(place / "compared", seeds=1)
    (place / "compared/runs/mixup/seed-0/model.pt").write_bytes(b"")
    before = there(place)
    done = bare.run(arguments, everything(), place)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("seht: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.rstrip().endswith(f"pip install 'seht[{extra}]'")
    assert there(place) == before


def test_ray_is_named_where_it_alone_is_missing(place):
    done = bare.run(["compare", "digits", "--engine", "ray"], {"ray"}, place)
    assert done.returncode == 2
    assert "pip install 'seht[ray]'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["pytorch_optimizer", "tqdm"])
def test_one_missing_package_is_named_before_anything_runs(place, package):
    """``sam`` would be the first to ask for ``pytorch_optimizer``, after the others' hours."""
    done = bare.run(["compare", "digits"], {package}, place)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        rf"seht: error: seht compare needs .*{package}.*: pip install 'seht\[lab\]'\n", done.stderr
    )
    assert not (place / "runs").exists()


@pytest.mark.parametrize("extra", ["lightning", "huggingface"])
def test_an_adapter_names_its_extra(place, extra):
    without = {"lightning", "pytorch_lightning", "transformers", "accelerate"}
    done = bare.run([], without, place, start=("-c", f"import seht.integrations.{extra}"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"seht.errors.MissingExtraError: seht.integrations.{extra} needs ")
    assert last.endswith(f"pip install 'seht[{extra}]'")


def test_what_needs_no_extra_works_without_any(place):
    for arguments in (
        ["--help"],
        ["--version"],
        ["train", "digits", "--help"],
        ["compare", "--help"],
        ["list"],
        ["check", "mine:example"],
        OWN,
    ):
        done = bare.run(arguments, everything(), place)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and done.stdout


def imported():
    """Every package that a file below ``seht`` imports, with the file."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            else:
                continue
            yield from ((name.partition(".")[0], file.relative_to(SOURCE)) for name in names)


def test_every_package_that_is_imported_belongs_to_an_extra():
    known = {*sys.stdlib_module_names, "torch", "typing_extensions", "seht", "pydoc_data"}
    frameworks = {"lightning", "pytorch_lightning", "transformers"}  # their users have them
    for package, file in imported():
        if package in known or (package in frameworks and file.parts[0] == "integrations"):
            continue
        assert package in everything(), (
            f"{file} imports {package}, which no extra is known to bring"
        )
        own = {
            name for extra in ("ray", "crosscheck", "finetune") for name in extras.PACKAGES[extra]
        }
        if file.parts[0] == "lab" and package not in own:
            assert package in extras.PACKAGES["lab"], f"{file} imports {package}"
        if file.parts[0] == "measure":
            assert package in extras.PACKAGES["measure"], f"{file} imports {package}"


def test_the_packages_are_those_that_pyproject_installs():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    modules = {"scikit-learn": "sklearn", "curvlinops-for-pytorch": "curvlinops"}
    brought = {"lab": {"numpy", "requests"}}  # by scikit-learn and pooch
    for extra, names in extras.PACKAGES.items():
        installed = set()
        lines = project["optional-dependencies"][extra]
        assert ("seht[lab]" in lines) == (extra in ("ray", "series", "finetune"))
        for line in set(lines) - {"seht[lab]"}:
            name = re.split(r"[<>=;\s]", line)[0]
            installed.add(modules.get(name, name.replace("-", "_")))
        assert set(names) == installed | brought.get(extra, set())
