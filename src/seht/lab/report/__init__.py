"""The report of a comparison: ``table.md``, ``table.csv`` and the page ``report.html``.

Everything comes from the comparison's directory; nothing is measured here.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seht.commands.files import put_text
from seht.lab import records
from seht.lab.report.load import load
from seht.lab.report.rows import build

__all__ = ["show", "write"]


def write(directory: str | Path, power: float | None = None) -> dict[str, Path]:
    """Write the three files into ``directory``; returns their paths by name.

    All are rendered before the first is written, and each replaces its predecessor in one go.
    ``power`` asks for the number of seeds that a difference of that size takes.
    """
    files = {Path(directory) / name: text for name, text in render(directory, power).items()}
    for file, text in files.items():
        put_text(file, text)
    return {file.name: file for file in files}


def render(directory: str | Path, power: float | None = None) -> dict[str, str]:
    """The three files' texts by their names."""
    from seht.lab.report import page, table

    with _sense(directory):
        rows = build(load(directory), power)
        return {
            "table.md": table.markdown(rows),
            "table.csv": table.comma_separated(rows),
            "report.html": page.render(rows),
        }


@contextmanager
def _sense(directory: str | Path) -> Iterator[None]:
    """What was read without complaint, but makes no report, is a mistake in the records."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise records.RunError(
            f"no report can be made of the records in {str(directory)!r} ({reason}; "
            f"{Path(where.filename).name}, line {where.lineno}): one was altered; remove it, and "
            "`seht compare` makes it again"
        ) from error


def show(directory: str | Path, power: float | None = None) -> None:
    """Print the table."""
    from rich.console import Console

    from seht.lab.report import table, words

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = 120
    # Where nobody reads on, rich itself would end the program with exit code 1.
    with _sense(directory), console.capture() as text:
        rows = build(load(directory), power)
        console.print(table.terminal(rows, console.width))
        console.print(words.brief(rows), soft_wrap=True)
    print(text.get(), end="")
