"""The table as Markdown, as CSV and in the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from seht.lab.report import words
from seht.lab.report.columns import Column, columns
from seht.lab.report.rows import ENDS, MethodRow, ReportTable

if TYPE_CHECKING:
    from rich.table import Table


def markdown(table: ReportTable) -> str:
    """``table.md``: the table, the runs that are missing from it, and how to read it."""
    shown = columns(table)
    lines = [
        f"# {words.title(table)}",
        "",
        words.lead(table),
        "",
        _line(["method", *(column.title.replace("\n", " ") for column in shown)]),
        _line(["---", *("---:" for _ in shown)]),
    ]
    for row in table.rows:
        cells = [
            f"**{text}**" if text and is_best(table, row, column) else text
            for column in shown
            for text in [f"{column.cell(row)} {column.detail(row)}".strip()]
        ]
        lines.append(_line([f"`{row.method}`", *cells]))
    for theirs in table.quoted:
        cells = [column.quoted(theirs) for column in shown]
        lines.append(_line([f"*{theirs.label}* (the paper's figure only)", *cells]))
    lines += ["", *(f"- {note}" for note in words.notes(table))]
    gaps = words.gaps(table)
    if gaps:
        lines += ["", "## Runs that are not in the table", ""]
        lines += [f"- `{run.method}`, seed {run.seed}: {said}" for run, said in gaps]
    lines += ["", "## To repeat it", "", "```", words.command(table.comparison), "```", ""]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def is_best(table: ReportTable, row: MethodRow, column: Column, place: int = 0) -> bool:
    """Whether the row is the best (or the second, ``place=1``) of a metric's column."""
    ranked = table.ranked(column.figure)
    return len(ranked) > max(1, place) and ranked[place] == row.method


# --- CSV --------------------------------------------------------------------------------------


def comma_separated(table: ReportTable) -> str:
    """``table.csv``: one row per method, every digit, an empty cell where there is nothing.

    What depends on the machine's speed is in columns that begin with ``seconds`` or ``ratio``.
    """
    rows = [dict(_cells(table, row)) for row in table.rows]
    # A dict as an ordered set: the columns of all rows, each row's in its own order.
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=lambda name: name.startswith(("seconds", "ratio")))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _cells(table: ReportTable, row: MethodRow) -> Iterator[tuple[str, object]]:
    yield "method", row.method
    yield "n", row.done
    yield "asked", row.asked
    difference = row.difference
    yield f"difference_{table.compared}", difference and difference.value
    yield "difference_low", difference and difference.low
    yield "difference_high", difference and difference.high
    yield "difference_n", difference and difference.n
    yield "difference_p", difference and difference.p
    yield "difference_p_holm", row.p
    if table.power is not None:
        yield "power_difference", table.power
        yield "power_seeds", row.needed
    for name, summary in row.figures.items():
        yield name, summary.value
        yield f"{name}_stderr", summary.error
    if any(f"{end}_eigenvalue" in row.figures for end in ENDS):
        yield "eigenvalue_bounds", " ".join(sorted(row.bounds))
    if row.stability is not None:
        yield "stability", row.stability
    if row.equilibria is not None:
        yield "equilibria", row.equilibria[0]
    if row.paper is not None:
        for key, (value, error) in row.paper.figures.items():
            yield f"paper_{key}", value
            yield f"paper_{key}_stderr", error
    if row.ratio is not None:
        yield from zip(("ratio", "ratio_low", "ratio_high"), row.ratio, strict=True)
    if row.searched is not None:
        yield "search_runs", row.searched
        yield "ratio_with_search", row.total


# --- the terminal -----------------------------------------------------------------------------


def terminal(table: ReportTable, width: int = 100) -> Table:
    """For ``rich`` to print: as many columns as fit, the most telling ones first."""
    from rich.console import Console
    from rich.measure import Measurement

    shown = columns(table)
    # Whole columns go where there is no room: half a figure is worse than none.
    keep = sorted(shown, key=lambda column: column.priority)
    console = Console(width=10_000)
    while True:
        drawn = _draw(table, [column for column in shown if column in keep], max(24, width // 3))
        needed = Measurement.get(console, console.options, drawn).maximum
        if needed <= width or len(keep) <= 1:
            return drawn
        keep.pop()


def _draw(table: ReportTable, shown: list[Column], widest: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        box=box.SIMPLE_HEAD,
        title=words.title(table),
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    drawn.add_column("method", overflow="fold", max_width=widest, vertical="top")
    for column in shown:
        drawn.add_column(column.title, justify="right", no_wrap=True)
    for number, row in enumerate(table.rows):
        last_above = number + 1 < len(table.rows) and table.rows[number + 1].ours and not row.ours
        drawn.add_row(
            Text(_folded(row, widest)),
            *(
                Text(column.cell(row), style="bold" if is_best(table, row, column) else "")
                for column in shown
            ),
            end_section=last_above or number + 1 == len(table.rows),
        )
    for theirs in table.quoted if any(column.figure == "paper" for column in shown) else []:
        drawn.add_row(
            Text(f"{theirs.label} (paper only)", style="dim"),
            *(Text(column.quoted(theirs), style="dim") for column in shown),
        )
    return drawn


def _folded(row: MethodRow, width: int) -> str:
    """The method's text, broken where a reader would."""
    if len(row.method) <= width:
        return row.method
    pieces = [f"{name}({options})" if options else name for name, options in row.parts]
    text = "\n+ ".join(pieces)
    return "\n".join(
        line if len(line) <= width else line.replace("(", "\n  (") for line in text.split("\n")
    )
