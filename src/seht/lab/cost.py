"""What a step of each method costs in steps of the baseline, timed in turns in one process.

Whatever else the machine does slows both alike. The learning rate is 0: the arithmetic is that of
any other, and no method can diverge. A method is taken to the middle of its training first, where
its warm-up is over; a round is fifty steps where time allows, because some methods do more every
fiftieth.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

from seht.errors import PenaltyWarning
from seht.lab.records import read_json, write_json
from seht.lab.training import Training, repeatable

if TYPE_CHECKING:
    from seht.lab.compare import Comparison, Say

CYCLE = 50
MOST = 10 * CYCLE
LEAST = 10
WARM = 5
SECONDS = 3.0  # for a method; or 2 % of its training, if that is more
SHARE = 0.02
ONE = {"ratio": 1.0, "low": 1.0, "high": 1.0}


def complete(comparison: Comparison, say: Say) -> None:
    """Measure what ``cost.json`` does not have yet."""
    path = comparison.out / "cost.json"
    found: dict[str, Any] = read_json(path) or {}
    baseline, *others = comparison.entries
    if found.get(baseline.name) != ONE:  # timed against another baseline
        found = {baseline.name: ONE}
    left = [entry for entry in others if entry.name not in found]
    for entry in left:
        say(f"timing {entry.name} against {baseline.name}")
        with repeatable(comparison.recipe.threads):
            try:
                with warnings.catch_warnings():
                    # The runs themselves have said it already.
                    warnings.simplefilter("ignore", PenaltyWarning)
                    found[entry.name] = ratio(
                        *(in_the_middle(comparison.training(row)) for row in (baseline, entry))
                    )
            except (ArithmeticError, RuntimeError):
                continue  # its runs say why
        write_json(path, found)


def in_the_middle(training: Training) -> Training:
    """Move a training to its middle, about to make a step."""
    training.go_to(training.recipe.epochs // 2)
    training.begin_epoch(0.0)
    training.model.train()
    training.method.seek(training.step - training.step % CYCLE)
    return training


def ratio(baseline: Training, other: Training) -> dict[str, float]:
    """The median over rounds of a step's cost in steps of the baseline, and the quartiles."""
    batches = [
        itertools.cycle(list(itertools.islice(t.data.train_batches(0), CYCLE)))
        for t in (baseline, other)
    ]
    steps = other.data.steps_per_epoch * other.recipe.epochs

    def pair() -> tuple[float, float]:
        return timed(baseline, next(batches[0])), timed(other, next(batches[1]))

    for _ in range(WARM):
        seconds = sum(pair())
    budget = max(SECONDS, SHARE * steps * seconds)
    count = int(budget / seconds)
    count = min(MOST, count - count % CYCLE) if count >= CYCLE else max(LEAST, count)
    other.method.seek(other.step - other.step % CYCLE)
    pairs = [pair() for _ in range(count)]
    rounds = [quotient(pairs[i : i + CYCLE]) for i in range(0, count, CYCLE)]
    if len(rounds) < 3:  # too few for a median: what is drawn must be averaged over
        draw = random.Random(0)
        rounds = [quotient(draw.choices(pairs, k=count)) for _ in range(400)]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return {"ratio": middle, "low": low, "high": high}


def timed(training: Training, batch: Any) -> float:
    """Seconds of one step, to its end on the device."""
    start = time.perf_counter()
    training.learn(batch)
    training.loss.item()
    return time.perf_counter() - start


def quotient(pairs: list[tuple[float, float]]) -> float:
    """The ratio of the sums, which averages over all that a method may do in a step."""
    return sum(other for _, other in pairs) / sum(base for base, _ in pairs)
