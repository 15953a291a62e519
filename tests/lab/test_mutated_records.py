"""Whatever a record has become, its readers have a result or a mistake in one line."""

import itertools
import json
import shutil

import comparisons
import mutations
import pytest
from conftest import EVERYTHING
from small import digits

from seht.lab import measured, records, report
from seht.lab.bench.command import Command
from seht.lab.methods.parse import parse
from seht.lab.records import Record, RunError
from seht.lab.schedulers import Following
from seht.lab.trials import Trial

TIMES = 400 if EVERYTHING else 60
JSON = [
    "comparison.json",
    "cost.json",
    "runs/mixup/seed-0/config.json",
    "runs/mixup/seed-0/result.json",
]
CSV = ["runs/mixup/seed-0/metrics.csv"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    top = tmp_path_factory.mktemp("whole")
    more = {
        "eigenvalues": {"largest": [35.2], "smallest": [-0.7], "converged": True},
        "stability": {"verdict": "stable", "equilibrium": True},
    }
    comparisons.comparison(top, ["weight-decay", "mixup"], seeds=1, more=more)
    return top


@pytest.fixture
def place(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "compared")


def one_line(error):
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000


def mutated(file):
    text = file.read_text()
    mutate = mutations.of_csv if file.suffix == ".csv" else mutations.of_json
    for seed in range(TIMES):
        content = mutate(text, seed)
        file.write_bytes(content)
        yield seed, content


def survive(function, allowed, seed, content):
    """``True`` for a result, ``False`` for a mistake in one line."""
    try:
        function()
    except allowed as error:
        one_line(error)
        return False
    except Exception as error:
        raise AssertionError(f"seed {seed}: {content[:600]!r}") from error
    return True


@pytest.mark.parametrize("name", [*JSON, *CSV])
def test_the_report(place, name):
    cases = itertools.islice(mutated(place / name), None if EVERYTHING else 15)
    found = [survive(lambda: report.render(place), RunError, *case) for case in cases]
    assert True in found and False in found  # both kinds were tried


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_run_that_is_looked_at_again(place, name):
    folder = place / "runs/mixup/seed-0"
    recipe = digits()
    trial = Trial(recipe, parse("mixup"), 0, folder)
    config = trial.describe()
    records.write_json(folder / "config.json", config)

    def look():
        Record(folder).ended(config, retry=False)
        result = trial.finished()
        if result is not None:
            from seht.lab.compare import summary
            from seht.lab.search import score

            summary(result)
            score([result])

    found = [survive(look, RunError, *case) for case in mutated(folder / name)]
    assert False in found and (name == "config.json" or True in found)


def test_a_run_that_is_measured(place):
    folder = place / "runs/mixup/seed-0"
    trial = Trial(digits(), parse("mixup"), 0, folder)
    records.write_json(folder / "config.json", trial.describe())
    (folder / "model.pt").write_bytes(b"no weights")

    def read():
        measured.subjects([str(folder)], "train")

    found = [survive(read, ValueError, *case) for case in mutated(folder / "config.json")]
    assert set(found) == {False}


def test_trials_that_are_followed(place):
    trial = Trial(digits(), parse("mixup"), 0, place / "runs/mixup/seed-0")

    def follow():
        Following(lambda line: None, every=-1).look([trial])

    for case in mutated(trial.out / "metrics.csv"):
        assert survive(follow, (), *case)


def test_a_bench_that_is_joined(tmp_path):
    row = {"key": "h/scalar", "label": "SEHT-H", "curvature": "hessian", "limit": 3.0, "ratio": 3.0}
    model = {
        "name": "mlp",
        "title": "MLP",
        "sizes": {"full": "small"},
        "rows": [row],
        "compiled": [],
    }
    machine = {"command": "seht bench", "seconds": 3, "load": 0.1, "seht": "0.1.0"}
    about = {"cpu": "x", "cores": 2, "threads": 1, "system": "y", "torch": "2", "python": "3"}
    data = {"machine": machine | about | {"date": "today"}, "settings": {}, "models": [model]}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(data))

    def join():
        Command(models=["mlp"], join=[str(file)])

    found = [survive(join, ValueError, *case) for case in mutated(file)]
    assert True in found and False in found
