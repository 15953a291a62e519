"""A user's own examples, out of a NumPy file: ``x`` and ``y``, and ``x_test`` and ``y_test``.

A table may also be a CSV file. Without a test set a fifth of the examples, the same for every seed,
is taken.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from seht.lab.config import DataConfig, Recipe
from seht.lab.data import files
from seht.lab.data.examples import Labelled
from seht.lab.data.files import DataError
from seht.lab.data.tables import divided, scaled

_TABLE = "own-table"
_OR_A_SHEET = ", or --data.file mine.csv, with the label in the last column"
_SHAPES = {
    _TABLE: ("examples", "columns"),
    "own-series": ("examples", "channels", "length"),
    "own-images": ("examples", "channels", "height", "width"),
}
_EACH, _RATINGS = 5, 20
"""A label of fewer examples, or of more values with fractions, is a quantity: no recipe has its
loss, and noise would draw one of its values as if it were a class."""

_FAR = 1e4
"""Standard deviations between a column and zero, from which on it is moved to zero in float64."""

_LARGEST = 1e37
"""What float32 can hold, and add up a little."""


def sealed(recipe: Recipe, data_dir: Any = None) -> Recipe:
    """The recipe with the checksum of its file in it: with another file it is another run."""
    if recipe.data.name not in _SHAPES:
        return recipe
    seal = _found(recipe.data, data_dir)[1]
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, seal=seal))


def own(data: DataConfig, data_dir: Any = None) -> Labelled:
    """What is in the file, read once per process."""
    return _read(*_found(data, data_dir), data.name)


def _found(data: DataConfig, data_dir: Any) -> tuple[Path, str]:
    if data.file is None:
        raise DataError(
            f"{data.name} reads a file of yours, and none is named: --data.file mine.npz, which "
            f"numpy.savez('mine.npz', x=x, y=y) writes{_OR_A_SHEET if data.name == _TABLE else ''}"
        )
    path = files.named(data.file, data_dir)
    seal = files.digest(path, "sha256")
    if data.seal not in (None, seal):
        raise DataError(f"{path} is not the file of data.seal; put that one back, or leave it out")
    return path, seal


@functools.lru_cache(maxsize=1)
def _read(path: Path, _seal: str, name: str) -> Labelled:
    import numpy as np

    arrays = _arrays(path, name)
    parts = ("", "_test") if "x_test" in arrays else ("",)
    if {f"{letter}{part}" for letter in "xy" for part in parts} != arrays.keys():
        raise DataError(f"{path} must have x and y, or x_test and y_test too, not {[*arrays]}")
    shape, first = _SHAPES[name], arrays["x"]
    for part in parts:
        x, y = arrays[f"x{part}"], arrays[f"y{part}"]
        if x.ndim != len(shape) or x.shape[1:] != first.shape[1:] or not x.size:
            raise DataError(f"x{part} in {path} must be ({', '.join(shape)}), not {x.shape}")
        if x.dtype != first.dtype:  # pixels and fractions would look alike
            raise DataError(f"x{part} in {path} must be {first.dtype} as x is, not {x.dtype}")
        if x.dtype.kind not in "buif" or not np.isfinite(x).all():
            raise DataError(f"x{part} in {path} must be finite numbers; fill or drop the others")
        if np.abs(x.astype(np.float64)).max() > _LARGEST:
            raise DataError(f"x{part} in {path} must lie within ±{_LARGEST:g}; scale it")
        if y.shape != x.shape[:1]:
            raise DataError(f"y{part} in {path} must be {len(x)} labels, not {y.shape}")
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise DataError(f"y{part} in {path} must be {len(x)} labels, and some are missing")
    classes, y = np.unique(np.concatenate([arrays[f"y{p}"] for p in parts]), return_inverse=True)
    if len(classes) == 1:
        raise DataError(f"y in {path} has one class only, {classes[0]}; there must be two or more")
    fractions = classes.dtype.kind == "f" and len(classes) > _RATINGS and (classes % 1).any()
    if fractions or len(classes) > len(y) / _EACH:
        raise DataError(
            f"y in {path} must be classes, and has {len(classes)} values in {len(y)} examples; "
            "make a few classes of a quantity"
        )
    ys = torch.as_tensor(y).split([len(arrays[f"y{part}"]) for part in parts])
    if unknown := set(ys[-1].tolist()) - set(ys[0].tolist()):
        (label,) = classes[min(unknown) : min(unknown) + 1].tolist()
        raise DataError(
            f"y_test in {path} has the label {label!r}, which y has not; write both alike, or "
            "leave its examples out"
        )
    pixels = name == "own-images" and first.dtype == np.uint8
    white = 255 if pixels else 1
    shift = 0.0 if pixels else _far(first)
    xs = [
        torch.from_numpy(x if pixels else (x - shift).astype(np.float32))
        for x in (arrays[f"x{part}"] for part in parts)
    ]
    if len(xs) == 2:
        return scaled(xs[0], ys[0], xs[1], ys[1], white)
    return divided(xs[0], ys[0], len(y) - len(y) // 5, white)


def _far(x: Any) -> Any:
    """The mean of each column, or channel, that lies so far from zero that float32 would blur it.

    Of a time in seconds, 1.7e9, float32 keeps two minutes. Other columns stay as they are: 0.
    """
    import numpy as np

    over = (0, *range(2, x.ndim))
    mean, std = (part(x, axis=over, keepdims=True, dtype=np.float64) for part in (np.mean, np.std))
    return np.where(np.abs(mean) > _FAR * std, mean, 0.0)


def _arrays(path: Path, name: str) -> dict[str, Any]:
    import numpy as np

    if path.suffix.lower() in (".csv", ".tsv"):
        if name != _TABLE:
            raise DataError(f"{path} is a table, for the recipe {_TABLE}; {name} reads a .npz file")
        return sheet(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, EOFError, ValueError, TypeError, AttributeError, BadZipFile) as error:
        raise DataError(f"{path} is not a file of arrays; numpy.savez writes one") from error


def sheet(path: Path) -> dict[str, Any]:
    """``x`` and ``y`` of a CSV file, the label last; its first line may have the columns' names."""
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
        if not cells[-1].strip():
            raise DataError(f"{path}, line {number} has no label at its end; drop it, or name it")
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
            reader = csv.reader(file, delimiter=max(";\t,", key=line.count))
            rows = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}") from error
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
            "numbers and decimal commas into points, fill or drop what is missing (the label is "
            "the last column)"
        )
    return value
