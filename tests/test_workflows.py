"""GitHub's workflows: they run where nobody here looks, so what they name has to be there."""

import os
import re
import shlex
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
FLOWS = {path.name: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*")}
STEPS = [
    pytest.param(step, id=f"{name}-{job}-{number}")
    for name, flow in FLOWS.items()
    for job, what in flow["jobs"].items()
    for number, step in enumerate(what["steps"])
]


def step_of(name, command):
    """The one step of a workflow that runs this command."""
    steps = [step for job in FLOWS[name]["jobs"].values() for step in job["steps"]]
    [found] = [step for step in steps if step.get("run", "").startswith(command)]
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_step_names_what_there_is(step):
    if "uses" in step:
        assert re.search(r"@(v\d+|release/v\d+)$", step["uses"])
        return
    words = [word for word in shlex.split(step["run"]) if not re.match(r"\w+=\S*$", word)]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == ".ci/run":
        assert os.access(ROOT / words[0], os.X_OK)
    elif words[0] == ".venv/bin/python":
        assert (ROOT / words[-1]).is_file()
    else:
        assert words[0] == "test" and "seht.__version__" in step["run"]


def test_every_python_of_the_package_is_tried():
    project = (ROOT / "pyproject.toml").read_text()
    known = re.findall(r"Python :: (3\.\d+)", project)
    assert FLOWS["tests.yml"]["jobs"]["tests"]["strategy"]["matrix"]["python"] == known


def test_nothing_may_write_but_what_publishes():
    for name, flow in FLOWS.items():
        assert flow["permissions"] == {"contents": "read"}, name
        for job, what in flow["jobs"].items():
            assert (job == "publish") == ("permissions" in what), (name, job)
    trusted = FLOWS["release.yml"]["jobs"]["publish"]
    assert trusted["permissions"] == {"id-token": "write"} and trusted["environment"] == "pypi"
    assert trusted["needs"] == "build"


def test_links_get_the_repository_s_address():
    for name, command in (("release.yml", "make dist"), ("site.yml", "make docs")):
        assert "github.repository" in step_of(name, command)["env"]["REPO_URL"]


def test_issue_forms_ask_for_something():
    for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        assert form.keys() >= {"name", "description", "body"}
        assert all(part["attributes"]["label"] for part in form["body"])
