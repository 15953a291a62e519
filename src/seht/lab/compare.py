"""A comparison: every method with every seed, what each costs, and the report.

All of it is in one directory, and every part is skipped where it is done: after a kill the same
command goes on, and ends with the same table.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import seht
from seht.lab import cost, refit, report, search
from seht.lab.config import Recipe
from seht.lab.data import DataError
from seht.lab.methods.parse import Spec
from seht.lab.places import alone, check_comparison
from seht.lab.records import Result, RunError, difference, plain, read_json, write_json
from seht.lab.schedulers import Scheduler
from seht.lab.schedulers.local import InTurn
from seht.lab.training import Training, repeatable
from seht.lab.trials import USUAL, Execution, Trial
from seht.measure.numbers import duration

Say = Callable[[str], None]
"""A function that prints a line of progress."""


@dataclass(frozen=True)
class Entry:
    """One row of the table: a method and the recipe that it runs on."""

    method: Spec
    recipe: Recipe
    changes: str = ""
    """What this row changes in the recipe, in words; part of its name."""
    over_decay: bool = False
    """Whether it uses the weight decay that a search has chosen."""

    def with_decay(self, weight: float | None) -> Entry:
        """The same with this weight decay, if it waits for one; ``None`` takes the recipe's."""
        given = {} if weight is None else {"weight": weight}
        found = Spec({**self.method.parts, "weight-decay": given})
        return replace(self, method=found) if self.over_decay else self

    @property
    def label(self) -> str | None:
        """Its name, if that is not the method's text."""
        return f"{self.method.text}@{self.changes}" if self.changes else None

    @property
    def name(self) -> str:
        """Its name in tables and records."""
        return self.label or self.method.text

    @property
    def slug(self) -> str:
        """The directory of its runs."""
        return f"{self.method.slug}@{self.changes}" if self.changes else self.method.slug


@dataclass(frozen=True)
class Comparison:
    """What is compared; the first entry is the baseline."""

    recipe: Recipe
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    out: Path
    execution: Execution = USUAL
    refit: bool = False
    """Whether what is judged is trained on the validation examples too."""

    def trial(self, entry: Entry, seed: int, *, folder: str = "runs") -> Trial:
        """One run of it; those that must not see the test set are in other folders than these."""
        test, out = folder == "runs", self.out / folder / entry.slug / f"seed-{seed}"
        trial = Trial(entry.recipe, entry.method, seed, out, test, entry.label, self.execution)
        return refit.again(self, entry, trial) if self.refit and test else trial

    def training(self, entry: Entry) -> Training:
        """A row's first run, about to begin, in this process."""
        how, recipe = self.execution, entry.recipe
        if self.refit:
            judged = refit.judged(entry)  # also of a tuned row, whose first training is another
            recipe = recipe if refit.tuned(entry) else judged
        return Training(
            recipe, entry.method, self.seeds[0], data_dir=how.data_dir, device=how.device
        )

    def trials(self, say: Say = print) -> list[Trial]:
        """All methods of a seed, then the next seed: pairs are complete early."""
        made = []
        for seed, entry in itertools.product(self.seeds, self.entries):
            try:
                made.append(self.trial(entry, seed))
            except refit.NoPathError as error:
                say(f"left out: {error}; --retry runs it again")
        return made

    def there(self) -> Any:
        """What the directory was used for before, if it was; an error if ``--refit`` differs."""
        found = read_json(self.out / "comparison.json")
        if found is not None and bool(found.get("refit")) != self.refit:
            how = "without" if self.refit else "with"
            raise RunError(
                f"{self.out} holds a comparison {how} --refit; choose another directory with "
                f"--out, or go on {how} it"
            )
        return found

    def claim(self) -> None:
        """Make the directory this comparison's, or see that its recipe is the one there."""
        from seht.lab.recipes import identity

        path = self.out / "comparison.json"
        recipe = plain(identity(self.recipe))
        if (there := self.there()) is not None:
            other = difference({"recipe": recipe}, there)
            if other is not None:
                raise RunError(
                    f"{self.out} holds a comparison with another recipe ({other}); choose another "
                    "directory with --out, or remove that one"
                )
        write_json(
            path,
            {
                "recipe": recipe,
                "methods": [entry.name for entry in self.entries],
                "seeds": list(self.seeds),
                **({"refit": True} if self.refit else {}),
                "version": seht.__version__,
            },
        )


def compare(
    comparison: Comparison,
    *,
    grid: Sequence[Sequence[Entry]] | None = None,
    grid_seeds: int = 1,
    scheduler: Scheduler | None = None,
    costs: bool = True,
    what_fits: bool = False,
    power: float | None = None,
    say: Say = print,
) -> dict[str, Path]:
    """Run what is not done yet, write the report, and return its files.

    ``grid`` has the candidates of every row, of which :mod:`seht.lab.search` keeps the one that is
    best on the validation split, with seeds of its own. A method that does not fit the recipe is an
    error, or with ``what_fits`` left out. ``power``: see :mod:`seht.lab.report`.
    """
    scheduler = scheduler or InTurn()
    if grid is not None:
        search.check_search(comparison, grid_seeds)
    check_comparison(comparison.out)
    with alone(comparison.out, patience=0):
        comparison.there()
        asked = [[entry] for entry in comparison.entries] if grid is None else grid
        rows = fitting(comparison, asked, what_fits, say)
        comparison = replace(comparison, entries=tuple(row[0] for row in rows))
        if grid is not None:
            chosen = search.best(comparison, rows, grid_seeds, scheduler, say)
            comparison = replace(comparison, entries=tuple(chosen))
        comparison.claim()
        if comparison.refit and (firsts := refit.firsts(comparison)):
            say(f"tuning {len(firsts)} runs with held-out examples; then all train on them")
            run(firsts, scheduler, say)
        run(comparison.trials(say), scheduler, say)
        if costs:
            cost.complete(comparison, say)
        return report.write(comparison.out, power)


def fitting(
    comparison: Comparison, rows: Sequence[Sequence[Entry]], leave_out: bool, say: Say
) -> Sequence[Sequence[Entry]]:
    """Build every method once, so that mistakes show now and not after an hour."""
    kept = []
    for row in rows:
        try:
            for entry in row:
                first = comparison.seeds[0]
                if comparison.refit or comparison.trial(entry, first).finished() is None:
                    with repeatable(entry.recipe.threads):
                        comparison.training(entry)
        except (MemoryError, RuntimeError):
            pass  # the machine that runs it may have room; if not, its runs say why
        except DataError as error:
            raise RunError(str(error)) from error
        except ValueError as error:
            said = str(error)
            named = said.startswith((f"{entry.name} ", f"{entry.name}:"))
            said = said if named else f"{entry.name}: {said}"
            if not leave_out:
                raise RunError(said) from error
            say(f"left out: {said}")
            continue
        kept.append(row)
    return kept


def run(trials: Sequence[Trial], scheduler: Scheduler, say: Say) -> list[Result]:
    """The results of all trials, in their order; those that are done are not run again."""
    found = {trial.out: trial.finished() for trial in trials}
    results = {out: result for out, result in found.items() if result is not None}
    left = [trial for trial in trials if trial.out not in results]
    if results:
        say(f"{len(results)} of {len(trials)} runs are done already")
    begun, before = time.monotonic(), len(results)

    def done(trial: Trial, result: Result) -> None:
        results[trial.out] = result
        each = (time.monotonic() - begun) / (len(results) - before)
        rest = len(trials) - len(results)
        ahead = f", about {duration(each * rest)} left" if rest else ""
        say(f"[{len(results)}/{len(trials)}] {trial.name}: {summary(result)}{ahead}")

    scheduler.run(left, done)
    return [results[trial.out] for trial in trials]


def summary(result: Result) -> str:
    """One line: the figures, or why there are none."""
    if not result.done:
        return f"failed: {result.reason}"
    last: dict[str, Any] = result.metrics["last"]
    words = ("test_top1", "test_perplexity", "valid_top1", "valid_perplexity")
    found = [f"{word.replace('_', ' ')} {last[word]:.2f}" for word in words if word in last]
    return ", ".join([*found, f"{result.seconds:.1f} s"])
