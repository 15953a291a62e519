"""Trials, the independent parts of a comparison; :mod:`seht.lab.schedulers` has who runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seht.lab import progress
from seht.lab.config import Recipe
from seht.lab.locks import alone, lock_of
from seht.lab.records import Record, Result

SAVE_EVERY = 30.0  # seconds
PATIENCE = 10.0  # seconds; a killed comparison's workers may take a moment to leave


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: everything that its result depends on, and where it goes."""

    recipe: Recipe
    method: str
    seed: int
    out: Path
    test: bool = True
    label: str | None = None
    """The row's name where it is not the method's text."""
    data_dir: str | None = None
    device: str = "auto"
    save_every: float = SAVE_EVERY
    retry: bool = False
    """Whether it is run again where it has failed."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label or self.method}, seed {self.seed}"

    @property
    def begun(self) -> bool:
        """Whether a process has ever started on it."""
        return lock_of(self.out).exists()

    def finished(self) -> Result | None:
        """Its result, if this very run has one that is to stay."""
        from seht.lab.runner import describe

        record = Record(self.out)
        result = record.result()
        if result is not None:
            name = self.label or self.method
            record.check(describe(self.recipe, name, self.seed, self.test))
            if self.retry and not result.done:
                return None
        return result

    def run(self, watch: progress.Watch | None = None, patience: float = PATIENCE) -> Result:
        """Train, here and now; ``patience``: seconds to wait for another process to leave."""
        from seht.lab.runner import train

        return train(
            self.recipe,
            self.method,
            self.seed,
            self.out,
            data_dir=self.data_dir,
            device=self.device,
            test=self.test,
            label=self.label,
            watch=watch,
            save_every=self.save_every,
            patience=patience,
            retry=self.retry,
        )

    def fail(self, reason: str, patience: float = PATIENCE) -> Result:
        """Write down why it failed, for a process that could not; a result that is there stays."""
        from seht.lab.runner import describe

        record = Record(self.out)
        name = self.label or self.method
        config = describe(self.recipe, name, self.seed, self.test)
        with alone(self.out, patience):
            there = record.ended(config, self.retry)
            if there is not None:
                return there
            record.claim(config)
            result = Result("failed", reason, name, self.seed, 0, 0, 0.0, {})
            record.finish(result)
        return result
