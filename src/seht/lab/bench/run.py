"""All measurements of a run, model by model."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from seht.errors import PenaltyWarning, brief
from seht.lab.bench import memory, rows, timing
from seht.lab.bench.accuracy import Errors, Estimated, Moments, draw_moments
from seht.lab.bench.cases import CASES, Case
from seht.lab.bench.results import CaseResult, RowResult, Settings
from seht.lab.bench.rows import BenchRow
from seht.lab.bench.runners import Penalty, Runner
from seht.lab.training import repeatable


def say(text: str) -> None:
    """Progress: one line as soon as something is known."""
    print(text, file=sys.stderr, flush=True)


def bench(names: Sequence[str], settings: Settings) -> list[CaseResult]:
    """Measure these models."""
    start = time.perf_counter()
    benches = [_Bench(name, settings, start + settings.total) for name in names]
    with repeatable(settings.threads), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", PenaltyWarning)  # of weights that no training would use
        # Time first, for all models: where time is short, it is the last to be left out.
        for what in ("time", "compiled", "memory", "error", "variance"):
            for bench in benches:
                bench.measure(what)
            say(f"{what}: done after {time.perf_counter() - start:.0f} s")
    return [bench.result() for bench in benches]


class _Bench:
    """The measurements of one model."""

    def __init__(self, name: str, settings: Settings, end: float) -> None:
        self.case: Case = CASES[name]
        self.settings, self.end = settings, end
        own = self.case.rows
        self.table = [row for row in rows.table() if own is None or row.key in own]
        self.name, self.rows = name, {row.key: RowResult.empty(row) for row in self.table}
        self.compiled: list[RowResult] = []
        self.plain_seconds = 0.0
        self.plain_mib: float | None = None
        self.notes: list[str] = []

    def measure(self, what: str) -> None:
        """One measurement; what fails says why and does not stop the others."""
        if what == "compiled" and not self.case.compiled:
            return
        if self.late:
            self.notes.append(f"Not measured: {what}. The time allowed was over.")
            return
        {
            "time": self._time,
            "memory": self._memory,
            "error": self._errors,
            "variance": self._variances,
            "compiled": self._compiled,
        }[what]()

    def say(self, text: str) -> None:
        """Progress with this model."""
        say(f"{self.name}: {text}")

    @property
    def late(self) -> bool:
        """Whether nothing more should be begun."""
        return time.perf_counter() > self.end

    def result(self) -> CaseResult:
        """What was found."""
        scales = {
            "time and memory": self.settings.scale,
            "error": self.settings.error_scale,
            "variance": self.settings.variance_scale,
        }
        sizes = {what: self.case.describe(scale) for what, scale in scales.items()}
        rows, plain = list(self.rows.values()), (self.plain_seconds, self.plain_mib)
        return CaseResult(
            self.name, self.case.title, sizes, rows, *plain, self.notes, self.compiled
        )

    def _found(self, key: str, **figures: Any) -> None:
        row = replace(self.rows[key], **figures)
        if row.ratio is not None and row.variance is not None:
            row = replace(row, variance_time=row.ratio * row.variance)
        self.rows[key] = row

    def _failed(self, key: str, error: Exception) -> None:
        text = brief(error)
        notes = self.rows[key].notes
        if text not in notes:
            notes.append(text)
            self.say(f"{key}: not measured: {text}")

    def _time(self) -> None:
        problem = self.case.problem(self.settings.scale)
        runners: dict[str, Runner] = {}
        for row in self.table:
            try:
                runners[row.key] = row.runner(problem)
            except ValueError as error:
                self._failed(row.key, error)
        found, clock = timing.time_rows(
            problem,
            runners,
            slow={row.key for row in self.table if row.slow},
            first={row.key for row in self.table if row.essential},
            rounds=self.settings.rounds,
            slow_rounds=self.settings.slow_rounds,
            budget=self.settings.budgets[self.name],
            failed=self._failed,
            said=lambda key, t: self.say(f"{key}: {t.ratios[-1]:.2f} plain steps"),
        )
        self.plain_seconds = clock.plain_median
        for key, timed in found.items():
            self._found(key, **timed.figures())
        missing = [key for key, row in self.rows.items() if row.ratio is None and not row.notes]
        if missing:
            self.notes.append(f"Not timed, as the time allowed was over: `{'`, `'.join(missing)}`.")
        for key in ("hessian/scalar", "ggn/scalar"):
            if not self.settings.everything and clock.plain_median > 0.2:
                continue  # a check of a slow model takes its time
            runner = runners.get(key)
            if key in found and isinstance(runner, Penalty):
                cost = timing.check_cost(clock, runner, found[key].ratio)
                self.notes += [f"`{key}`: {cost}"] if cost else []

    def _compiled(self) -> None:
        """Time the essential rows on a compiled model; failures go into the notes."""
        settings, notes = self.settings, self.notes
        if not settings.everything:
            notes.append("The compiled model was left out, to save time.")
            return

        def failed(key: str, error: Exception) -> None:
            notes.append(f"compiled `{key}`: not measured: {brief(error)}")
            self.say(notes[-1])

        self.say("compiling, which takes minutes")
        problem = self.case.problem(settings.scale)
        table = [row for row in rows.table() if row.essential]
        try:
            problem = replace(problem, model=torch.compile(problem.model))  # type: ignore[arg-type]
            found, clock = timing.time_rows(
                problem,
                {row.key: row.runner(problem) for row in table},
                slow=set(),
                rounds=settings.rounds,
                slow_rounds=0,
                budget=settings.budgets[self.name] / 2,
                warm=math.inf,  # that is where things are compiled
                failed=failed,
                said=lambda key, t: self.say(f"compiled {key}: {t.ratios[-1]:.2f} plain steps"),
            )
        except Exception as error:  # a compiler may fail in any way
            failed("plain", error)
            return
        timed = {key: timing.figures() for key, timing in found.items()}
        self.compiled = [replace(RowResult.empty(r), **timed.get(r.key, {})) for r in table]
        notes.append(
            f"A compiled plain step took {1e3 * clock.plain_median:.0f} ms, an eager one "
            f"{1e3 * self.plain_seconds:.0f} ms."
        )

    def _memory(self) -> None:
        keys = [
            row.key
            for row in self.table
            if (self.settings.everything and self.rows[row.key].ratio is not None) or row.essential
        ]
        if not self.settings.everything:
            self.notes.append("Memory was measured for a few rows only, to save time.")
        threads, checks = self.settings.threads, self.settings.everything
        name, scale = self.name, self.settings.scale
        try:
            for item in memory.measure(name, scale, keys, threads=threads, checks=checks):
                key = item["row"]
                if "error" in item:
                    self.rows[key].notes.append(f"memory: {item['error']}")
                    continue
                if key == "plain":
                    self.plain_mib = item["peak"]
                if self.plain_mib:
                    check = item["check"] / self.plain_mib if "check" in item else None
                    self._found(key, memory=item["peak"] / self.plain_mib, check_memory=check)
                self.say(f"{key}: {item['peak']:.1f} MiB")
        except (OSError, RuntimeError, AttributeError) as error:
            self.notes.append(f"Memory was not measured: {error}")

    def _problem(self, scale: str) -> Any:
        return self.case.problem(scale, train=self.settings.train, dropout=False)

    def _errors(self) -> None:
        errors = Errors(self._problem(self.settings.error_scale), self.settings.error_draws)
        for row in self.table:
            if self.late:
                break
            try:
                found = errors.of(row)
            except Exception as error:
                self._failed(row.key, error)
                continue
            self._found(row.key, error=found)
            if found is not None:
                self.say(f"{row.key}: error {found:.1e}")

    def _variances(self) -> None:
        problem = self._problem(self.settings.variance_scale)
        seen: dict[str, Moments] = {}
        value: dict[str, Estimated | None] = {}
        for row in self.table:
            if row.same_draws != row.key or self.late:
                continue
            try:
                seen[row.key], chance = draw_moments(
                    row, problem, self.settings.variance_draws, self.settings.variance_seconds
                )
            except Exception as error:
                self._failed(row.key, error)
                continue
            first = seen.get(f"{row.curvature or 'ggn'}/scalar")
            if chance < 1 and first is not None:
                value[row.key] = seen[row.key].relative_to(first, chance)
            else:
                value[row.key] = seen[row.key].relative_variance()
                self._offset(row, seen[row.key], first)
            of = value[row.key]
            self.say(f"{row.key}: variance {'not seen' if of is None else f'{of.value:.3g}'}")
        for row in self.table:
            if row.same_draws not in seen:
                continue
            of, draws = value[row.same_draws], seen[row.same_draws].count
            self._found(row.key, draws=draws)
            if of is None:
                said = f"variance: too large to be seen with {draws} draws"
                self.rows[row.key].notes.append(said)
            else:
                parts = of.value / row.divide, of.error / row.divide
                self._found(row.key, variance=parts[0], variance_error=parts[1])

    def _offset(self, row: BenchRow, seen: Moments, first: Moments | None) -> None:
        if first is None or first is seen:
            return
        offset = seen.offset(first)
        if offset is not None:
            trace = "tr(H)" if row.curvature == "hessian" else "tr(G)"
            self.rows[row.key].notes.append(
                f"its mean gradient is {offset:.2g} times the length of {trace}'s away from it"
            )
