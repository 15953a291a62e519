"""The report of a comparison: ``table.md``, ``table.csv`` and the page ``report.html``.

Everything comes from the comparison's directory; nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path

from seht.lab import records
from seht.lab.report.load import ReportError, load
from seht.lab.report.rows import build

__all__ = ["ReportError", "show", "write"]


def write(directory: str | Path, power: float | None = None) -> dict[str, Path]:
    """Write the three files into ``directory``; returns their paths by name.

    All are rendered before the first is written, and each replaces its predecessor in one go.
    ``power`` asks for the number of seeds that a difference of that size takes.
    """
    from seht.lab.report import page, table

    rows = build(load(directory), power)
    texts = {
        "table.md": table.markdown(rows),
        "table.csv": table.comma_separated(rows),
        "report.html": page.render(rows),
    }
    return {name: _replace(Path(directory) / name, text) for name, text in texts.items()}


def show(directory: str | Path, power: float | None = None) -> None:
    """Print the table."""
    from rich.console import Console

    from seht.lab.report import table, words

    rows = build(load(directory), power)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = 120
    console.print(table.terminal(rows, console.width))
    console.print(words.brief(rows), soft_wrap=True)


def _replace(file: Path, text: str) -> Path:
    try:
        records.write(file, text)
    except records.RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ReportError(f"cannot write {str(file)!r}: {reason}") from error
    return file
