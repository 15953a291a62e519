"""Trials, the independent runs of a comparison; :mod:`seht.lab.schedulers` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seht import WeightPath
from seht.lab.config import Recipe
from seht.lab.methods.parse import Spec
from seht.lab.places import alone, lock_of
from seht.lab.progress import Watch
from seht.lab.records import Record, Result, plain

PATIENCE = 10.0  # seconds; a killed comparison's workers may take a moment to leave


@dataclass(frozen=True)
class Execution:
    """How runs are carried out; none of it changes their results."""

    data_dir: str | None = None
    """Where to look for the data first."""
    device: str = "auto"
    """Fabric's accelerator: ``auto``, ``cpu``, ``cuda``."""
    save_every: float = 30.0
    """Seconds between checkpoints."""
    retry: bool = False
    """Whether what has failed is run again."""


USUAL = Execution()


@dataclass(frozen=True)
class Trial:
    """One run: everything that its result depends on, and where it goes."""

    recipe: Recipe
    method: Spec
    seed: int
    """Determines the initial weights, the order of the data and everything else that is drawn."""
    out: Path
    """The run's own directory."""
    test: bool = True
    """``False`` keeps away from the test set (for searches on the validation split)."""
    label: str | None = None
    """The method's name in records, where that is not its text."""
    execution: Execution = USUAL

    @property
    def title(self) -> str:
        """The method's name in records."""
        return self.label or self.method.text

    @property
    def name(self) -> str:
        """The name to print."""
        return f"{self.title}, seed {self.seed}"

    @property
    def begun(self) -> bool:
        """Whether a process has ever started on it."""
        return lock_of(self.out).exists()

    def describe(self, ranks: int = 1) -> dict[str, Any]:
        """The configuration that identifies the run."""
        from seht.lab.recipes import identity

        found = {
            "recipe": identity(self.recipe),
            "method": self.title,
            "seed": self.seed,
            "test": self.test,
        }
        given = {name: options.get("weight") for name, options in self.method.parts.items()}
        paths = {n: path.state() for n, path in given.items() if isinstance(path, WeightPath)}
        found |= {"paths": paths} if paths else {}
        return plain(found | ({"ranks": ranks} if ranks > 1 else {}))

    def finished(self) -> Result | None:
        """Its result, if this very run has one that is to stay."""
        record = Record(self.out)
        result = record.result()
        if result is not None:
            record.check(self.describe())
            if self.execution.retry and not result.done:
                return None
        return result

    def run(
        self, watch: Watch | None = None, patience: float = PATIENCE, devices: int = 1
    ) -> Result:
        """Train, here and now, or go on where it was left: :func:`seht.lab.runner.run`."""
        from seht.lab.runner import run

        return run(self, watch=watch, patience=patience, devices=devices)

    def fail(self, reason: str, patience: float = PATIENCE) -> Result:
        """Write down why it failed, for a process that could not; a result that is there stays."""
        record, config = Record(self.out), self.describe()
        with alone(self.out, patience):
            there = record.ended(config, self.execution.retry)
            if there is not None:
                return there
            record.claim(config)
            result = Result("failed", reason, self.title, self.seed, 0, 0, 0.0, {})
            record.finish(result)
        return result
