"""What `make dist` builds installs into an empty environment, and works there."""

import email
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SMOKE = """
import sys, pathlib
import seht
assert pathlib.Path(seht.__file__).is_relative_to(sys.prefix), seht.__file__
{code}
assert penalty.last.trace > 0
assert (pathlib.Path(seht.__file__).parent / "py.typed").exists()
"""


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def described():
    """What setup.py makes of a text."""
    pytest.importorskip("setuptools")
    return runpy.run_path(str(ROOT / "setup.py"))["described"]


def test_links_lead_somewhere_on_a_package_index(described):
    readme = (ROOT / "README.md").read_text("utf-8")
    whole = described(readme, "https://example.org/us/seht", "1.2")
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", whole)
    assert len(links) > 25
    for link in map("".join, links):
        assert link.startswith("https://"), link
        path = link.removeprefix("https://example.org/us/seht/")
        if path != link:
            kind, tag, target = path.split("/", 2)
            picture = target.endswith(".svg")
            assert (kind, tag) == ("raw" if picture else "blob", "v1.2")
            assert (ROOT / target).is_file(), target
    assert whole.count("/raw/v1.2/docs/images/") == 2


def test_without_an_address_words_stand_alone(described):
    readme = (ROOT / "README.md").read_text("utf-8")
    bare = described(readme, "", "1.2")
    assert set(re.findall(r"\]\(([^)]+)\)", bare)) == {"https://arxiv.org/abs/2208.05924"}
    assert "<img" not in bare and "![" not in bare
    assert "what is supported" in bare and bare.startswith("If labels are partly wrong")
    assert re.findall("```.*?```", bare, re.DOTALL) == re.findall("```.*?```", readme, re.DOTALL)


@pytest.mark.parametrize("address", ["https://example.org/us/seht", ""], ids=["address", "none"])
def test_the_metadata_of_a_build(tmp_path, address):
    """As the build backend writes them, of a package with one file."""
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "src" / "seht"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    code = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
    run(sys.executable, "-c", code, cwd=tmp_path, env=surroundings() | {"REPO_URL": address})
    [found] = tmp_path.glob("*.dist-info/METADATA")
    said = email.message_from_string(found.read_text("utf-8"))
    import seht

    assert said["Version"] == seht.__version__
    assert said["Description-Content-Type"] == "text/markdown"
    urls = said.get_all("Project-URL", [])
    assert (f"Source, {address}" in urls) == bool(address) == bool(urls)
    text = said.get_payload()
    assert "## Ten lines" in text and "](docs/" not in text
    page = f"{address}/blob/v{seht.__version__}/docs/support.md"
    assert (f"[what is supported]({page})" in text) == bool(address)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution, from a copy: a build leaves folders behind."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs the package build")
    place = tmp_path_factory.mktemp("release")
    run("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", place / "clone")
    command = ("-m", "build", "-q", "--no-isolation", "-o", place / "dist", place / "clone")
    run(sys.executable, *command)
    return {path.suffix: path for path in (place / "dist").iterdir()}


def install(path, place):
    """An environment with seht alone; torch and the lab's packages are lent by this one."""
    run(sys.executable, "-m", "venv", "--without-pip", place)
    [packages] = place.glob("lib/python*/site-packages")
    offline = ("install", "-q", "--no-deps", "--no-index", "--no-build-isolation")
    where = ("--python", place / "bin" / "python")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))  # after our own
    run(sys.executable, "-m", "pip", *where, *offline, path, env=surroundings())
    return place / "bin"


def surroundings():
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".whl", ".gz"], ids=["wheel", "sdist"])
def test_it_installs_and_works(built, kind, tmp_path):
    bin = install(built[kind], tmp_path / "env")
    readme = (ROOT / "README.md").read_text("utf-8")
    code = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    options = {"cwd": tmp_path, "env": surroundings()}
    run(bin / "python", "-c", SMOKE.format(code=code), **options)
    import seht

    assert run(bin / "seht", "--version", **options).startswith(f"seht {seht.__version__} ")
    assert "digits-noisy" in run(bin / "seht", "list", **options)
    small = ("--epochs", "2", "--data.size", "100", "--model.width", "4", "--no-cost")
    asked = ("--methods", "weight-decay,seht-h", "--seeds", "1", "--out", "out", *small)
    run(bin / "seht", "compare", "digits", *asked, **options)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000  # its template was packed


@pytest.mark.slow
def test_what_is_in_it(built):
    """Files that are no modules are packed as well, and the extras are those we speak of."""
    import zipfile

    with zipfile.ZipFile(built[".whl"]) as wheel:
        inside = set(wheel.namelist())
        [metadata] = [name for name in inside if name.endswith("METADATA")]
        said = wheel.read(metadata).decode()
    source = ROOT / "src"
    for path in (source / "seht").rglob("*"):
        if path.suffix in (".html", ".css", ".json", ".typed", ".toml", ".md"):
            assert path.relative_to(source).as_posix() in inside, path
    for extra in ("lab", "ray", "measure", "lightning", "huggingface"):
        assert f"Provides-Extra: {extra}" in said


def test_versions_agree():
    tomllib = pytest.importorskip("tomllib")
    import seht

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert project["version"] == seht.__version__
    assert f"version: {seht.__version__}\n" in citation
    changes = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## \[(\d[^]]*)\] - (\S+)$", changes, re.MULTILINE).groups()
    assert version == seht.__version__
    assert f"date-released: {date}\n" in citation


def test_the_citation_can_be_read():
    """Every key that the format asks for, and authors by their names."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "version", "license"}
    paper = citation["preferred-citation"]
    assert paper["type"] == "article" and paper["year"] == 2022
    assert [author["family-names"] for author in paper["authors"]] == ["Liu", "Yu", "Lin"]
