"""``--refit``: train again on all the examples with what was chosen on the validation split.

Settings found by a grid stay as they are; a tuned weight repeats the path it took while the
validation examples were held out. So every row is judged after training on the same examples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from seht import WeightPath
from seht.lab.config import Recipe, check
from seht.lab.records import RunError
from seht.lab.trials import Trial

if TYPE_CHECKING:
    from seht.lab.compare import Comparison, Entry

FOLDER = "tuned"
"""The folder of the trainings that paths come from; these do not see the test set."""


class NoPathError(RunError):
    """A run is impossible because the training before it, which finds its path, has failed."""


def whole(recipe: Recipe) -> Recipe:
    """The recipe with its validation examples added to the training examples."""
    data = recipe.data
    if recipe.task == "text":
        raise RunError(
            f"--refit trains on the validation examples too, and {recipe.name} has them in a text "
            "of their own; leave it out"
        )
    if not data.validation:
        raise RunError(
            f"--refit needs a validation split, and {recipe.name} has none; hold some training "
            "examples out with --data.validation"
        )
    size = data.size
    if size is not None and not data.within:
        size += data.validation
    made = replace(recipe, data=replace(data, size=size, validation=0))
    check(made)
    return made


def judged(entry: Entry) -> Recipe:
    """The recipe that a row is judged on; a ``ValueError`` if its method needs validation data."""
    for part in entry.method.build(entry.recipe).methods:
        if part.chooses:
            raise ValueError(
                f"{part.name} looks at the validation examples to the end, and --refit trains on "
                "them; leave one of the two out"
            )
    return whole(entry.recipe)


def tuned(entry: Entry) -> list[str]:
    """The parts of a row whose weight is tuned."""
    built = entry.method.build(entry.recipe)
    return [part.name for part in built.methods if part.tuned]


def first(comparison: Comparison, entry: Entry, seed: int) -> Trial:
    """The training that a path is taken from."""
    return comparison.trial(entry, seed, folder=FOLDER)


def firsts(comparison: Comparison) -> list[Trial]:
    """All of them."""
    rows = [entry for entry in comparison.entries if tuned(entry)]
    return [first(comparison, entry, seed) for seed in comparison.seeds for entry in rows]


def again(comparison: Comparison, entry: Entry, trial: Trial) -> Trial:
    """The same run on all examples; a tuned weight's has no path before its first training."""
    names = tuned(entry)
    method = entry.method
    if names:
        result = first(comparison, entry, trial.seed).finished()
        if result is None or not result.done:
            reason = "has not ended" if result is None else f"failed: {result.reason}"
            raise NoPathError(
                f"{entry.name}, seed {trial.seed}: the training with held-out examples {reason}"
            )
        paths = result.paths or {}
        if still := [name for name in names if name not in paths]:
            raise RunError(
                f"{entry.name}, seed {trial.seed}: {still[0]}'s weight has not begun to move in "
                f"{result.steps} steps, so that there is no path to repeat; train longer"
            )
        method = method.along({name: WeightPath.of(paths[name]) for name in names})
    return replace(trial, recipe=whole(trial.recipe), method=method, label=entry.name)
