"""What a report says in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from seht.lab import paper
from seht.lab.report.load import DONE, FAILED, ComparisonRecord, RunRecord
from seht.lab.report.numbers import interval, plain
from seht.lab.report.rows import Rows
from seht.lab.report.verdicts import BETTER, WORSE, leaders


def title(table: Rows) -> str:
    """What was compared."""
    c = table.comparison
    return f"{c.name}: {_count(len(c.methods), 'method')}, {_count(len(c.seeds), 'seed')}"


def lead(table: Rows) -> str:
    """The answer in a few sentences; no method is called best where the data do not decide."""
    group = leaders(table)
    if not group:
        return "No run is done yet."
    baseline, key = table.comparison.baseline, (table.epoch, f"test_{table.metric.key}")
    what, unit = ("perplexity", "") if table.comparison.text else ("accuracy", " %")
    so_far = "" if all(run.status == FAILED for run, _ in gaps(table)) else " so far"
    best = group[0]
    value = plain(best.metrics[key]) + unit
    if len(group) > 1:
        named = [f"{best.method} ({value})", *(row.method for row in group[1:3])]
        if len(group) > 3:
            named.append(_count(len(group) - 3, "other"))
        said = f"Which test {what} is best is not decided{so_far}: these seeds do not tell "
        said += f"{', '.join(named[:-1])} and {named[-1]} apart"
    else:
        said = f"The best test {what}{so_far} is that of {best.method}, {value}"
        if best.difference is not None:
            said += f"; difference to {baseline} {interval(best.difference)}"
    compared = [row for row in table.rows if row.p is not None]
    if not compared:
        return f"{said}."
    if len(compared) == 1:
        (other,) = compared
        verdict = f"is {other.verdict}" if other.verdict else "is neither better nor worse"
        return f"{said}. {other.method} {verdict} than {baseline} (paired t-test at 5 %)."
    better, worse = (sum(row.verdict == verdict for row in compared) for verdict in (BETTER, WORSE))
    return (
        f"{said}. Of the {len(compared)} others {_none(better)} {'is' if better == 1 else 'are'} "
        f"better than {baseline} and {_none(worse)} worse (paired t-test at 5 %, Holm's correction "
        f"for {_count(len(compared), 'comparison')})."
    )


def _none(number: int) -> str:
    return str(number or "none")


def brief(table: Rows) -> str:
    """The terminal's caption."""
    said = f"mean ± standard error over n seeds; {_which(table)}; trace: {_trace(table)}"
    if any(row.verdict for row in table.rows):
        said += "; *: p below 5 % after Holm's correction"
    gaps_ = gaps(table)
    failed = sum(run.status == FAILED for run, _ in gaps_)
    if failed:
        said += f"; {_count(failed, 'run')} failed (--retry runs what has failed again)"
    if len(gaps_) > failed:
        said += f"; {_count(len(gaps_) - failed, 'run')} not done"
    return said


def _which(table: Rows) -> str:
    if table.epoch == "last":
        return "test accuracy after the last epoch"
    return "test perplexity at the epoch that was best on the validation text"


def _trace(table: Rows) -> str:
    probes = {run.number("trace", "probes") for run in table.comparison.runs.values()} - {None}
    said = "tr(H) of the training loss at the end"
    if len(probes) == 1:
        said += f", {next(iter(probes)):.0f} probes a run"
    return said


def notes(table: Rows) -> list[str]:
    """How to read the columns."""
    said = [f"{head}: {text}" for head, text in glossary(table)]
    warning = other_recipe(table)
    return said if warning is None else [warning, *said]


def glossary(table: Rows) -> Iterator[tuple[str, str]]:
    """Every term of the table, with what it means."""
    c = table.comparison
    yield "±", "the standard error of the mean over n seeds (s / √n)."
    yield _compared(table)
    yield f"difference to {c.baseline}", _PAIRED
    if any(row.p is not None for row in table.rows):
        yield "*", _HOLM
    if any(row.needed for row in table.rows):
        yield f"seeds for {table.power:g}", _NEEDED
    kept = {key for row in table.rows for _, key in row.metrics}
    if "test_ece" in kept:
        yield "calibration error", _CALIBRATION
    if any(key.endswith("bit") for key in kept):
        yield "at 8, 4, 3 bits; with 1, 3, 10 % noise", _ROBUSTNESS
    if any(row.ratio for row in table.rows):
        what = f"a training step in steps of {c.baseline}, timed in turns with it in one process."
        yield "cost", what
    if any(row.total for row in table.rows):
        yield "with search", _SEARCH
    if any(row.trace for row in table.rows):
        yield "trace", f"{_trace(table)}, its mean over seeds. Smaller is flatter."
    if any(row.weight_norm for row in table.rows):
        yield "weight norm", "of all parameters at the end."
    if any(row.train_loss for row in table.rows):
        yield "training loss", _TRAINING_LOSS
    if any(row.largest or row.smallest for row in table.rows):
        yield "eigenvalues", _eigenvalues(table)
    if any(row.stability for row in table.rows):
        yield "curvature at the end", _STABILITY
    if table.paper is not None:
        number = str(c.recipe["paper"]).replace("table", "table ")
        what = f"printed in {paper.SOURCE}, {number} ({table.paper.title})"
        yield "paper", f"{what}: mean ± standard error over 5 runs. We did not measure it."
        yield from _about_paper(table, table.paper)


_PAIRED = (
    "of runs with the same seed, so the same initial weights and order of data; the mean over "
    "pairs and Student's 95 % interval."
)
_HOLM = (
    "better or worse than the baseline: the paired t-test's p is below 5 % after Holm's correction "
    "for all methods of the table. An interval by itself is not corrected. Bold is the best mean, "
    "decided or not."
)
_NEEDED = (
    "how many would show a difference of that size to the baseline in four of five tables, by the "
    "strictest step of Holm's correction, from the spread of the differences seen. With few seeds "
    "that spread is itself rough."
)
_CALIBRATION = (
    "how far a prediction's confidence is from its chance to be right, on the test data in 15 "
    "equal bins of confidence (expected calibration error). 0 is best."
)
_ROBUSTNESS = (
    "the same figure with the weights rounded to so many bits (to nearest, a scale for each output "
    "channel), or with Gaussian noise of that share of each tensor's root mean square, one draw a "
    "run. Weights of two or more dimensions; biases and norms stay."
)
_SEARCH = (
    "one training and the search for its setting, in trainings of the baseline: cost times one "
    "more than the runs of the search. Chosen by validation accuracy, then loss, on labels as "
    "noisy as the training ones, with other seeds than those here."
)
_TRAINING_LOSS = (
    "plain cross-entropy of the weights at the end, in evaluation mode, on up to 1,000 training "
    "images or 20,000 tokens; in the figures it is the mean over an epoch's steps, as trained."
)
_STABILITY = (
    "of the training loss around the final weights. Upward: every direction leads up, as in a "
    "minimum. Partly downward: some direction still leads down, as at a saddle. Partly flat: some "
    "direction is level within the error. Settled: the gradient asks for a step of less than a "
    "thousandth of the weights along the stiffest direction; otherwise training was still moving. "
    "The paper's section 3.4 calls these stable, unstable and marginal, at an equilibrium or not."
)


def _eigenvalues(table: Rows) -> str:
    said = (
        "the largest and smallest of the Hessian of the training loss at the end, on a part of the "
        "training data; the paper's section 3.3."
    )
    if any(row.bounds for row in table.rows):
        said += (
            " ≥ and ≤: in some run the search ended before the value was found to a twentieth: the "
            "eigenvalue is at least, or at most, what is said (--spectrum allows more products)."
        )
    return said


def _compared(table: Rows) -> tuple[str, str]:
    if table.epoch == "last":
        return "test accuracy", (
            "of the weights after the last epoch; at the best epoch: of those that were best on "
            "the validation split. The test set is read once, at the end of a run."
        )
    return "perplexity", (
        "the exponential of the plain cross-entropy, of the weights that were best on the "
        "validation text. The test text is read once, at the end of a run."
    )


def _about_paper(table: Rows, theirs: paper.Table) -> Iterator[tuple[str, str]]:
    quoted = [row.label for row in theirs.rows if row.quoted]
    if quoted:
        yield "†", f"quoted by the paper from other publications: {', '.join(quoted)}."
    for row in theirs.rows:
        if row.note and not row.note.startswith("left out"):
            yield row.label, f"{row.note}."
    left_out = [row.label for row in theirs.rows if row.note.startswith("left out")]
    if left_out:
        yield ", ".join(left_out), "left out of the printed table, discussed in the paper's text."
    if theirs.elsewhere:
        yield "published elsewhere", "; ".join(theirs.elsewhere) + "."


_HARMLESS = {"threads", "precision", "eval_batch", "spectrum", "robustness"}


def other_recipe(table: Rows) -> str | None:
    """A warning, where the paper's figures stand beside those of a recipe that is not its own."""
    changed = {k: v for k, v in changes(table.comparison).items() if k not in _HARMLESS}
    if table.paper is None or not changed:
        return None
    said = ", ".join(f"{name} {written(value)}" for name, value in changed.items())
    return f"The paper's figures belong to its own recipe; these runs have {said}."


def gaps(table: Rows) -> list[tuple[RunRecord, str]]:
    """Every run that should be in the table and is not, with the reason and what to do."""
    c = table.comparison
    runs = [run for method in c.methods for run in c.of(method) if run.status != DONE]
    return [(run, _gap(run)) for run in runs]


def _gap(run: RunRecord) -> str:
    said = f"{run.status}: {run.reason}" if run.reason else run.status
    return f"{said}; `seht compare --retry` runs it again" if run.status == FAILED else said


# --- how to do it again -----------------------------------------------------------------------


def command(comparison: ComparisonRecord) -> str:
    """The call that makes this comparison."""
    parts = ["seht", "compare", comparison.name, "--methods", ",".join(comparison.methods)]
    seeds = comparison.seeds
    parts += ["--seeds", str(len(seeds))]
    if seeds and seeds[0]:
        parts += ["--first-seed", str(seeds[0])]
    for name, value in changes(comparison).items():
        parts += [f"--{name}", written(value)]
    return shlex.join([*parts, "--out", "DIR"])


def changes(comparison: ComparisonRecord) -> dict[str, Any]:
    """Fields that differ from the recipe of that name, as this version of seht knows it."""
    try:
        from seht.lab.recipes import from_dict, recipe, to_dict

        known = to_dict(recipe(comparison.name))
    except (ImportError, ValueError):
        return {}
    asked: Mapping[str, Any] = comparison.recipe
    with suppress(ValueError):  # fields that the record leaves out have their default
        asked = to_dict(from_dict(asked))
    before, now = dict(flat(known)), dict(flat(asked))
    return {name: value for name, value in now.items() if before.get(name) != value}


def written(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"model": {"width": 8}}`` as ``model.width, 8``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            # JSON knows no tuples.
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
