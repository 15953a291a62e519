"""Reads a comparison's directory; whatever is wrong with it is a ``RunError`` in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seht import WeightPath
from seht.lab.config import KINDS
from seht.lab.records import Record, RunError, read_json, read_metrics

DONE, FAILED, UNFINISHED, MISSING = "done", "failed", "unfinished", "not started"


@dataclass(frozen=True)
class RunRecord:
    """One method with one seed."""

    method: str
    seed: int
    status: str = MISSING
    reason: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, list[float]] = field(default_factory=dict)
    """The columns of ``metrics.csv``, NaN where a cell is empty."""
    versions: Mapping[str, str] = field(default_factory=dict)
    path: WeightPath | None = None
    """The way of a tuned weight, found in this run or repeated in it."""

    def number(self, *path: str) -> float | None:
        """A figure of ``result.json``, for example ``number("metrics", "last", "test_top1")``."""
        value: Any = self.result
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (list, tuple)):  # several eigenvalues: the outermost comes first
            value = value[0] if value else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value)


@dataclass(frozen=True)
class ComparisonRecord:
    """What one ``seht compare`` was asked, and every run it has made so far."""

    recipe: Mapping[str, Any]
    methods: list[str]
    seeds: list[int]
    runs: Mapping[tuple[str, int], RunRecord]
    costs: Mapping[str, Mapping[str, Any]]
    version: str | None = None
    searches: Mapping[str, int] = field(default_factory=dict)
    """Trainings that the choice of a method's setting took, where there was a search."""
    refit: bool = False
    """Whether what is judged was trained on the validation examples too."""
    edges: Mapping[str, str] = field(default_factory=dict)
    """The option whose smallest or largest candidate the search chose, by the method."""

    @property
    def name(self) -> str:
        """The recipe's."""
        return str(self.recipe["name"])

    @property
    def baseline(self) -> str:
        """The method that the others are compared with: the first."""
        return self.methods[0]

    @property
    def text(self) -> bool:
        """Language modelling, so perplexities; otherwise images and accuracies."""
        return self.recipe["data"]["name"] in KINDS["text"]

    def of(self, method: str) -> list[RunRecord]:
        """The method's runs, one for each seed that was asked for."""
        return [self.runs.get((method, seed), RunRecord(method, seed)) for seed in self.seeds]


def load(directory: str | Path) -> ComparisonRecord:
    """Read everything a report needs."""
    top = Path(directory)
    if not top.is_dir():
        raise RunError(f"there is no directory {str(directory)!r}")
    about = top / "comparison.json"
    asked = read_json(about)
    if asked is None:
        raise RunError(
            f"{str(directory)!r} is not a comparison: it has no comparison.json; "
            f"`seht compare RECIPE --out {directory}` writes one"
        )
    match asked:
        case {
            "recipe": {"name": str(), "data": {"name": str()}} as recipe,
            "methods": [_, *_] as methods,
            "seeds": [*_] as seeds,
        } if all(isinstance(m, str) for m in methods) and all(isinstance(s, int) for s in seeds):
            pass
        case _:
            raise RunError(
                f"{str(about)!r} does not name a recipe, its data, methods and seeds; "
                "`seht compare` writes it anew"
            )
    runs = {}
    for folder in sorted(top.glob("runs/*/seed-*")):
        run = _run(folder)
        if run is not None and run.method in methods and run.seed in seeds:
            runs[run.method, run.seed] = run
    costs = read_json(top / "cost.json") or {}
    if not all(isinstance(cost, dict) for cost in costs.values()):
        raise RunError(f"{str(top / 'cost.json')!r} is not a table of costs; {_AGAIN}")
    grid = read_json(top / "grid.json") or {}
    found, ends = grid.get("runs") or {}, grid.get("edges") or {}
    searches = {name: found[name] for name in methods if isinstance(found.get(name), int)}
    edges = {name: ends[name] for name in methods if isinstance(ends.get(name), str)}
    version, refit = asked.get("version"), asked.get("refit") is True
    return ComparisonRecord(recipe, methods, seeds, runs, costs, version, searches, refit, edges)


_AGAIN = "delete it, and `seht compare` makes it again"


def _run(folder: Path) -> RunRecord | None:
    """A run, begun or done; ``None`` for a folder in which nothing has been written yet."""
    config, result = read_json(folder / "config.json") or {}, Record(folder).result()
    if not config and result is None:
        return None
    curves = read_metrics(folder / "metrics.csv")
    versions = {str(k): str(v) for k, v in (config.get("versions") or {}).items()}
    if result is None:
        if not isinstance(config.get("method"), str) or not isinstance(config.get("seed"), int):
            raise RunError(f"{str(folder / 'config.json')!r} names no method or seed; {_AGAIN}")
        epochs = len(curves.get("epoch", []))
        said = f"{epochs} epoch{'' if epochs == 1 else 's'} done; `seht compare` continues it"
        method, seed = config["method"], config["seed"]
        return RunRecord(method, seed, UNFINISHED, said, curves=curves, versions=versions)
    try:
        paths = result.paths or config.get("paths") or {}
        path = next((WeightPath.of(state) for state in paths.values()), None)
    except (AttributeError, ValueError) as error:
        raise RunError(f"{str(folder / 'result.json')!r}: {error}; {_AGAIN}") from error
    found = result.method, result.seed, result.status, result.reason, asdict(result)
    return RunRecord(*found, curves, versions, path)
