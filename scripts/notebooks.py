"""Run the notebooks again and keep their outputs: ``python scripts/notebooks.py [NAME ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def executed(path: Path, settings: str = "") -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run; ``settings`` are added to its first code."""
    book = nbformat.read(path, as_version=4)
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    written = first.source
    first.source = f"{written}\n{settings}"
    NotebookClient(book, timeout=3600, kernel_name="python3").execute()
    first.source = written
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # the hour of the run
    return book


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(executed(path), path)
        print(path)
