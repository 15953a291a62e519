"""What a report says in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from seht.lab import paper
from seht.lab.fields import OURS, from_dict, to_dict, to_text
from seht.lab.recipes import RECIPES
from seht.lab.report.columns import columns, trace_in_words
from seht.lab.report.load import DONE, FAILED, ComparisonRecord, RunRecord
from seht.lab.report.rows import BETTER, WORSE, ReportTable


def title(table: ReportTable) -> str:
    """What was compared."""
    c = table.comparison
    return f"{c.name}: {_count(len(c.methods), 'method')}, {_count(len(c.seeds), 'seed')}"


def lead(table: ReportTable) -> str:
    """The answer in a few sentences; no method is called best where the data do not decide."""
    group = table.leaders()
    if not group:
        return "No run is done yet."
    baseline = table.comparison.baseline
    what, unit = ("perplexity", "") if table.comparison.text else ("accuracy", " %")
    so_far = "" if all(run.status == FAILED for run, _ in gaps(table)) else " so far"
    best = group[0]
    value = f"{best.figures[table.compared]}{unit}"
    if lost := sum(run.status == FAILED for run in table.comparison.of(best.method)):
        value += f" without {_count(lost, 'run')} of it that failed"
    if len(group) > 1:
        named = [f"{best.method} ({value})", *(row.method for row in group[1:3])]
        if len(group) > 3:
            named.append(_count(len(group) - 3, "other"))
        said = f"Which test {what} is best is not decided{so_far}: these seeds do not tell "
        said += f"{', '.join(named[:-1])} and {named[-1]} apart"
    else:
        said = f"The best test {what}{so_far} is that of {best.method}, {value}"
        if best.difference is not None:
            said += f"; difference to {baseline} {best.difference}"
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


def brief(table: ReportTable) -> str:
    """The terminal's caption."""
    said = f"mean ± standard error over n seeds; {_which(table)}; trace: {trace_in_words(table)}"
    if any(row.ratio is not None for row in table.rows):
        said += f"; cost: a step in steps of {table.comparison.baseline}"
    if any(row.total is not None for row in table.rows):
        said += ", with search: one training and its search in trainings of it"
    if any(row.needed is not None for row in table.rows):
        said += "; seeds for a gap: how many would show it in four of five tables"
    if any(row.verdict for row in table.rows):
        said += "; *: p below 5 % after Holm's correction"
    spreads = [row.difference.spread for row in table.rows if row.difference]
    if table.power and not any(spread is not None for spread in spreads):
        said += "; --power needs two methods with two seeds or more, whose spread it is about"
    gaps_ = gaps(table)
    failed = sum(run.status == FAILED for run, _ in gaps_)
    if failed:
        said += f"; {_count(failed, 'run')} failed (--retry runs what has failed again)"
    if len(gaps_) > failed:
        said += f"; {_count(len(gaps_) - failed, 'run')} not done"
    return said


def _which(table: ReportTable) -> str:
    if not table.comparison.text:
        return "test accuracy after the last epoch"
    return "test perplexity at the epoch that was best on the validation text"


def notes(table: ReportTable) -> list[str]:
    """How to read the columns."""
    said = [f"{head}: {text}" for head, text in glossary(table)]
    warning = other_recipe(table)
    return said if warning is None else [warning, *said]


def glossary(table: ReportTable) -> Iterator[tuple[str, str]]:
    """Every term of the table, with what it means."""
    yield "±", "the standard error of the mean over n seeds (s / √n)."
    yield _compared(table)
    # A dict as an ordered set: some columns share an entry.
    yield from dict.fromkeys(column.meaning for column in columns(table) if column.meaning)
    if edges := table.comparison.edges:
        named = ", ".join(f"{method} ({option})" for method, option in edges.items())
        yield (
            "edge of the search",
            (
                f"{named}: the smallest or largest candidate was chosen, and a better one may lie "
                "beyond it. Search again with wider candidates, written a|b|c."
            ),
        )
    if any(row.p is not None for row in table.rows):
        yield "*", _HOLM
    if table.paper is not None:
        number = str(table.comparison.recipe["paper"]).replace("table", "table ")
        what = f"printed in {paper.SOURCE}, {number} ({table.paper.title})"
        yield "paper", f"{what}: mean ± standard error over 5 runs. We did not measure it."
        yield from _about_paper(table.paper)


_HOLM = (
    "better or worse than the baseline: the paired t-test's p is below 5 % after Holm's correction "
    "for all methods of the table. An interval by itself is not corrected. Bold is the best mean, "
    "decided or not."
)


def _compared(table: ReportTable) -> tuple[str, str]:
    read = "is read once, at the end of a run."
    if table.comparison.recipe.get("curve"):
        read = "is read at the end of a run, and after every epoch for the figure alone."
    if not table.comparison.text:
        return "test accuracy", (
            "of the weights after the last epoch; at the best epoch: of those that were best on "
            f"the validation split. The test set {read}"
        )
    return "perplexity", (
        "the exponential of the plain cross-entropy, of the weights that were best on the "
        f"validation text. The test text {read}"
    )


def _about_paper(theirs: paper.Table) -> Iterator[tuple[str, str]]:
    quoted = [row.label for row in theirs.rows if row.quoted]
    if quoted:
        yield "†", f"quoted by the paper from other publications: {', '.join(quoted)}."
    yield from ((row.label, f"{row.note}.") for row in theirs.rows if row.note and row.printed)
    left_out = [row.label for row in theirs.rows if not row.printed]
    if left_out:
        yield ", ".join(left_out), "left out of the printed table, discussed in the paper's text."
    if theirs.elsewhere:
        yield "published elsewhere", "; ".join(theirs.elsewhere) + "."


def other_recipe(table: ReportTable) -> str | None:
    """A warning, where the paper's figures stand beside those of a recipe that is not its own."""
    harmless = OURS - {"data.validation"}
    changed = {k: v for k, v in changes(table.comparison).items() if k not in harmless}
    if table.paper is None or not changed:
        return None
    said = ", ".join(f"{name} {to_text(value)}" for name, value in changed.items())
    return f"The paper's figures belong to its own recipe; these runs have {said}."


def gaps(table: ReportTable) -> list[tuple[RunRecord, str]]:
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
    rows = _preset(comparison) or [comparison.name, "--methods", ",".join(comparison.methods)]
    parts, seeds = ["seht", "compare", *rows], comparison.seeds
    parts += ["--seeds", str(len(seeds))]
    if seeds and seeds[0]:
        parts += ["--first-seed", str(seeds[0])]
    parts += ["--refit"] if comparison.refit else []
    for name, value in changes(comparison).items():
        parts += [f"--{name}", to_text(value)]
    return shlex.join([*parts, "--out", "DIR"])


def _preset(comparison: ComparisonRecord) -> list[str]:
    """The preset whose rows change the recipe, which no method's text can say; else nothing."""
    for preset in paper.PRESETS.values():
        rows = [f"{row.method}@{row.changed}" for row in preset.rows if row.changes]
        if rows == comparison.methods and comparison.name.removesuffix("-small") == preset.recipe:
            small = ["--small"] if comparison.name != preset.recipe else []
            return ["--preset", preset.name, *small]
    return []


def changes(comparison: ComparisonRecord) -> dict[str, Any]:
    """Fields that differ from the recipe of that name, as this version of seht knows it."""
    if comparison.name not in RECIPES:
        return {}
    known = to_dict(RECIPES[comparison.name]())
    asked: Mapping[str, Any] = comparison.recipe
    with suppress(ValueError):  # fields that the record leaves out have their default
        asked = to_dict(from_dict(asked))
    before, now = dict(flat(known)), dict(flat(asked))
    return {name: value for name, value in now.items() if before.get(name) != value}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"model": {"width": 8}}`` as ``model.width, 8``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
