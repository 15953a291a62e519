"""The penalised step under ``torch.compile``, over a compiled plain step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from seht.lab.bench import rows, timing
from seht.lab.bench.cases import Case
from seht.lab.bench.results import CaseResult, Say, Settings, brief


def run_compiled(case: Case, result: CaseResult, settings: Settings, say: Say) -> None:
    """Time the essential rows on a compiled model; failures go into the notes."""
    if not settings.everything:
        result.notes.append("The compiled model was left out, to save time.")
        return

    def failed(key: str, error: Exception) -> None:
        result.notes.append(f"compiled `{key}`: not measured: {brief(error)}")
        say(result.notes[-1])

    say("compiling, which takes minutes")
    problem = case.problem(settings.scale)
    table = [row for row in rows.table() if row.essential]
    try:
        problem = replace(problem, model=torch.compile(problem.model))  # type: ignore[arg-type]
        found, clock = timing.time_rows(
            problem,
            {row.key: row.runner(problem) for row in table},
            slow=set(),
            rounds=settings.rounds,
            slow_rounds=0,
            budget=settings.budgets[result.name] / 2,
            warm=math.inf,  # that is where things are compiled
            failed=failed,
            said=lambda key, t: say(f"compiled {key}: {t.ratios[-1]:.2f} plain steps"),
        )
    except Exception as error:  # a compiler may fail in any way
        failed("plain", error)
        return
    result.timed_compiled(table, found)
    result.notes.append(
        f"A compiled plain step took {1e3 * clock.plain_median:.0f} ms, an eager one "
        f"{1e3 * result.plain_seconds:.0f} ms."
    )
