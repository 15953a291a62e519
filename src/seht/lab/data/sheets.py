"""A CSV file as the arrays of a user's own table: a row for each example, the label last."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from seht.lab.data.files import DataError


def arrays(path: Path) -> dict[str, Any]:
    """``x`` and ``y`` of a file whose first line may have the columns' names."""
    import numpy as np

    rows = _rows(path)
    number, first = rows[0]
    names = [f"column {place}" for place in range(1, len(first) + 1)]
    if any(_number(cell) is None for cell in first[:-1]):
        names = [f"column {cell!r}" for cell in first]
        rows = rows[1:]
    if len(first) < 2 or not rows:
        raise DataError(f"{path} must have a row for each example, with its label at the end")
    table: list[list[float]] = []
    for number, cells in rows:
        if len(cells) != len(first):
            raise DataError(f"{path}, line {number} has {len(cells)} cells, not {len(first)}")
        table.append([_value(path, number, *both) for both in zip(names, cells[:-1], strict=False)])
    words = [cells[-1].strip() for _, cells in rows]
    numbers = [_number(word) for word in words]
    return {"x": np.array(table), "y": np.array(words if None in numbers else numbers)}


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """The cells of each line that has some, with its number."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=line.count))
            rows = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no CSV file in UTF-8: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty")
    return rows


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _value(path: Path, line: int, name: str, cell: str) -> float:
    value = _number(cell)
    if value is None:
        raise DataError(
            f"{path}, line {line}, {name}: {cell.strip()!r} is not a number; turn words into "
            "numbers, fill or drop what is missing (the label is the last column)"
        )
    return value
