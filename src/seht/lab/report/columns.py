"""The columns of the report's table, for the terminal, Markdown, the page and ``table.csv``.

A new column is a :class:`Column` here, and its figure a field of a row (``rows.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from seht.lab import paper
from seht.lab.ending import BITS, NOISE
from seht.lab.report.rows import ENDS, MethodRow, ReportTable
from seht.lab.report.stats import MOST_SEEDS
from seht.measure.numbers import number

GROUPS = RESULTS, BOUGHT, RISES, FLATNESS = (
    "Results",
    "What it buys",
    "Loss added by weight noise, measured and as the trace predicts it",
    "Cost and flatness",
)
LEAST = 9


@dataclass(frozen=True)
class Column:
    """One column; it is shown if some row has a value for it."""

    title: str
    """The heading; a line break in it is kept on the terminal."""
    cell: Callable[[MethodRow], str]
    group: str = RESULTS
    figure: str = ""
    """The name of its figure, ``difference`` or ``paper``, if the page draws it in its own way."""
    priority: int = LEAST
    """On a narrow terminal, columns with larger numbers are dropped first."""
    detail: Callable[[MethodRow], str] = lambda row: ""
    """More about the figure, shown if there is room."""
    quoted: Callable[[paper.PaperRow], str] = lambda row: ""
    """The cell of a row that only the paper has."""
    meaning: tuple[str, str] | None = None
    """Its entry in the glossary: the term and its explanation."""


def columns(table: ReportTable) -> list[Column]:
    """All columns that have anything in them."""
    found = [*_results(table), *_bought(table), *_rises(table), *_seeds(table), *_flatness(table)]
    return [
        column
        for column in found
        if any(column.cell(row) for row in table.rows) or any(map(column.quoted, table.quoted))
    ]


def _results(table: ReportTable) -> Iterator[Column]:
    for figure, title in _metrics(table):
        compared = figure == table.compared
        yield Column(title, _figure(figure), figure=figure, priority=0 if compared else LEAST)
        if compared:
            yield from _beside(table)
    if table.compared not in dict(_metrics(table)):
        yield from _beside(table)


def _metrics(table: ReportTable) -> list[tuple[str, str]]:
    if table.comparison.text:
        found = [
            ("best_valid_perplexity", "valid\nperplexity"),
            ("best_test_perplexity", "test\nperplexity"),
            ("last_test_perplexity", "test, last\nepoch"),
        ]
    elif table.comparison.recipe["data"]["name"] == "cifar100":
        found = [
            ("last_test_top1", "test\ntop-1, %"),
            ("last_test_top5", "test\ntop-5, %"),
            ("best_test_top1", "at the\nbest epoch"),
        ]
    else:
        found = [("last_test_top1", "test\naccuracy, %"), ("best_test_top1", "at the\nbest epoch")]
    return [item for item in found if any(item[0] in row.figures for row in table.rows)]


def _beside(table: ReportTable) -> Iterator[Column]:
    """The difference, and what the paper prints."""
    baseline = table.comparison.baseline
    yield Column(
        f"difference to\n{baseline} [95 %]",
        lambda row: f"{row.difference or ''}{' *' if row.verdict else ''}",
        figure="difference",
        priority=1,
        meaning=(
            f"difference to {baseline}",
            "of runs with the same seed, so the same initial weights and order of data; the mean "
            "over pairs and Student's 95 % interval.",
        ),
    )
    titles = {
        "test_top1": "top-1",
        "test_top5": "top-5",
        "valid_perplexity": "valid",
        "test_perplexity": "test",
    }
    for key in table.paper.rows[0].figures if table.paper else ():
        say = _printed(key)
        cell = _theirs(say)
        title = f"paper:\n{titles[key]}"
        yield Column(title, cell, figure="paper", priority=5, quoted=say)


def _bought(table: ReportTable) -> Iterator[Column]:
    """What flatness is for: calibration, and what rounded and disturbed weights are worth."""
    epoch = table.compared.partition("_")[0]
    yield Column("test\nloss", _measured(f"{epoch}_test_loss"), BOUGHT, f"{epoch}_test_loss")
    titles = {
        f"{epoch}_test_ece": "calibration\nerror, %",
        **{f"{table.compared}_{bits}bit": f"at\n{bits} bits" for bits in BITS},
        **{f"{table.compared}_noise{share}": f"with\n{share} % noise" for share in NOISE},
    }
    for figure, title in titles.items():
        meaning = CALIBRATION if figure.endswith("ece") else ROBUSTNESS
        yield Column(title, _figure(figure), BOUGHT, figure, meaning=meaning)


def _rises(table: ReportTable) -> Iterator[Column]:
    """What weight noise adds to the training loss, and what the trace says it should."""
    epoch = table.compared.partition("_")[0]
    for share in NOISE:
        for title, end in ((f"rise at\n{share} % noise", ""), ("by the\ntrace", "_predicted")):
            figure = _measured(f"{epoch}_train_rise_noise{share}{end}")
            yield Column(title, figure, RISES, meaning=RISE)


def _seeds(table: ReportTable) -> Iterator[Column]:
    yield Column(
        "n",
        lambda row: str(row.done) if row.done == row.asked else f"{row.done} of {row.asked}",
        priority=2,
    )
    yield Column(
        f"seeds for\na gap of {table.power or 0:g}",
        lambda row: _needed(row) if table.power else "",
        priority=2,
        meaning=(
            f"seeds for a gap of {table.power or 0:g}",
            "how many would show a difference of that size to the baseline in four of five tables, "
            "by the strictest step of Holm's correction, from the spread of the differences seen. "
            "With few seeds that spread is itself rough.",
        ),
    )


def _flatness(table: ReportTable) -> Iterator[Column]:
    cost = f"a training step in steps of {table.comparison.baseline}, timed in turns with it in one"
    yield Column(
        "cost\nratio",
        lambda row: "" if row.ratio is None else number(row.ratio[0]),
        FLATNESS,
        priority=3,
        detail=_spread,
        meaning=("cost", f"{cost} process."),
    )
    yield Column(
        "with\nsearch",
        lambda row: "" if row.total is None else number(row.total),
        FLATNESS,
        priority=3,
        meaning=SEARCH,
    )
    flat = f"{trace_in_words(table)}, its mean over seeds. Smaller is flatter."
    yield Column("trace", _measured("trace"), FLATNESS, priority=4, meaning=("trace", flat))
    ends = EIGENVALUES
    if any(row.bounds for row in table.rows):
        ends += (
            " ≥ and ≤: in some run the search ended before the value was found to a twentieth: the "
            "eigenvalue is at least, or at most, what is said (--spectrum allows more products)."
        )
    for which, bound in zip(ENDS, "≥≤", strict=True):
        title, cell = f"{which}\neigenvalue", _end(which, bound)
        yield Column(title, cell, FLATNESS, priority=7, meaning=("eigenvalues", ends))
    yield Column(
        "curvature\nat the end",
        lambda row: curvature(row.stability),
        FLATNESS,
        priority=6,
        detail=_equilibria,
        meaning=STABILITY,
    )
    norm = ("weight norm", "of all parameters at the end.")
    yield Column("weight norm", _measured("weight_norm"), FLATNESS, meaning=norm)
    yield Column("training loss", _measured("train_loss"), FLATNESS, meaning=TRAINING_LOSS)


def trace_in_words(table: ReportTable) -> str:
    """How the trace was measured: on which loss, and with how many probes."""
    probes = {run.number("trace", "probes") for run in table.comparison.runs.values()} - {None}
    said = "tr(H) of the training loss at the end"
    return f"{said}, {next(iter(probes)):.0f} probes a run" if len(probes) == 1 else said


CALIBRATION = (
    "calibration error",
    "how far a prediction's confidence is from its chance to be right, on the test data in 15 "
    "equal bins of confidence (expected calibration error). 0 is best.",
)
ROBUSTNESS = (
    "at 8, 4, 3 bits; with 1, 3, 10 % noise",
    "the same figure with the weights rounded to so many bits (to nearest, a scale for each output "
    "channel), or with Gaussian noise of that share of each tensor's root mean square, one draw a "
    "run. Weights of two or more dimensions; biases and norms stay.",
)
RISE = (
    "rise; by the trace",
    "what Gaussian noise of that share of each tensor's root mean square r adds to the training "
    "loss, on up to 200 examples (four draws, both signs); by the trace: half the share's square "
    "times the sum of r² tr(H) over the tensors. That is right for small noise on smooth networks; "
    "the kinks of a ReLU add to what is measured.",
)
SEARCH = (
    "with search",
    "one training and the search for its setting, in trainings of the baseline: cost times one "
    "more than the runs of the search. Chosen by validation accuracy, then loss, on labels as "
    "noisy as the training ones, with other seeds than those here.",
)
TRAINING_LOSS = (
    "training loss",
    "plain cross-entropy of the weights at the end, in evaluation mode, on up to 1,000 training "
    "images or 20,000 tokens; in the figures it is the mean over an epoch's steps, as trained.",
)
EIGENVALUES = (
    "the largest and smallest of the Hessian of the training loss at the end, on a part of the "
    "training data; the paper's section 3.3."
)
STABILITY = (
    "curvature at the end",
    "of the training loss around the final weights. Upward: every direction leads up, as in a "
    "minimum. Partly downward: some direction still leads down, as at a saddle. Partly flat: some "
    "direction is level within the error. Settled: the gradient asks for a step of less than a "
    "thousandth of the weights along the stiffest direction; otherwise training was still moving. "
    "The paper's section 3.4 calls these stable, unstable and marginal, at an equilibrium or not.",
)


# --- cells ------------------------------------------------------------------------------------


def _figure(name: str) -> Callable[[MethodRow], str]:
    return lambda row: str(row.figures.get(name, ""))


def _measured(name: str) -> Callable[[MethodRow], str]:
    return lambda row: row.figures[name].measured if name in row.figures else ""


def _end(which: str, bound: str) -> Callable[[MethodRow], str]:
    """An end of the spectrum, or what bounds it."""
    cell = _measured(f"{which}_eigenvalue")
    return lambda row: f"{bound} " * (which in row.bounds and bool(cell(row))) + cell(row)


def curvature(verdicts: str | None) -> str:
    """``"marginal (2), unstable (1)"`` as ``"partly flat (2), partly downward (1)"``."""
    said = {
        "stable": "upward",
        "unstable": "partly downward",
        "marginal": "partly flat",
        "undecided": "not found",
    }
    words = [word.partition(" (") for word in (verdicts or "").split(", ")]
    return ", ".join(
        said.get(verdict, verdict) + between + rest for verdict, between, rest in words
    )


def _equilibria(row: MethodRow) -> str:
    if row.equilibria is None:
        return ""
    yes, known = row.equilibria
    if yes in (0, known):
        return "(settled)" if yes else "(still moving)"
    return f"(settled: {yes} of {known})"


def _needed(row: MethodRow) -> str:
    if row.difference is None or row.difference.spread is None:
        return ""
    return f"> {MOST_SEEDS:,}" if row.needed is None else f"{row.needed:,}"


def _spread(row: MethodRow) -> str:
    if row.ratio is None or row.ratio[1] is None or row.ratio[2] is None:
        return ""
    low, high = number(row.ratio[1]), number(row.ratio[2])
    return "" if low == high else f"[{low}, {high}]"


def _printed(key: str) -> Callable[[paper.PaperRow], str]:
    """What the paper prints, marked where it is another publication's."""

    def text(row: paper.PaperRow) -> str:
        value, error = row.figures[key]
        said = f"{value:g}" if error is None else f"{value:.2f} ± {error:.2f}"
        return f"{said} †" if row.quoted else said

    return text


def _theirs(say: Callable[[paper.PaperRow], str]) -> Callable[[MethodRow], str]:
    return lambda row: "" if row.paper is None else say(row.paper)
