"""The lab's runs for ``seht measure``: the trained weights with the run's own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from seht.errors import one_line
from seht.lab.methods.base import Batch
from seht.lab.methods.loss import plain_loss
from seht.lab.records import loads
from seht.measure.survey import Subject


def subjects(paths: Sequence[str], split: str, data_dir: str | None = None) -> list[Subject]:
    """One for each run; a comparison's directory stands for all its runs that are done."""
    if split not in ("train", "valid", "test"):
        raise ValueError(f"--split must be train, valid or test, not {split!r}")
    found = [directory for path in paths for directory in _runs(Path(path))]
    return [_subject(directory, split, data_dir, short=len(found) > 1) for directory in found]


def _runs(path: Path) -> list[Path]:
    if path.is_file():
        path = path.parent
    if (path / "config.json").is_file():
        if not (path / "model.pt").is_file():
            raise ValueError(f"{path} has no model.pt: the run is not done; let it finish first")
        return [path]
    below = sorted(file.parent for file in path.glob("runs/*/seed-*/model.pt"))
    if not below:
        raise ValueError(
            f"{path} is neither a run (config.json and model.pt) nor a comparison with runs that "
            "are done; give what seht train --out or seht compare --out wrote"
        )
    return below


def _subject(directory: Path, split: str, data_dir: str | None, *, short: bool) -> Subject:
    from seht.lab.data import load
    from seht.lab.models import build
    from seht.lab.recipes import from_dict

    try:
        config = loads((directory / "config.json").read_text(encoding="utf-8"))
        recipe = from_dict(config["recipe"])
        method, seed = str(config["method"]), int(config["seed"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = one_line(error)[:200]
        raise ValueError(f"{directory / 'config.json'} cannot be read: {reason}") from error
    data = load(recipe, seed, data_dir=data_dir)
    model = build(recipe.model, data)
    try:
        state = torch.load(directory / "model.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except Exception as error:
        reason = one_line(error)[:200]
        raise ValueError(
            f"{directory / 'model.pt'} does not hold this run's weights ({reason}); train it again"
        ) from error
    text = recipe.task == "text"
    name = f"{method}, seed {seed}" if short else f"{recipe.name}: {method}, seed {seed}"
    return Subject(name, model, plain_loss, _Split(data, split), batch_dim=1 if text else 0)


class _Split:
    """One split, read again and again; each stretch of a text on its own, from a fresh state."""

    def __init__(self, data: Any, split: str) -> None:
        self._data, self._split = data, split

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._data.eval_batches(self._split))
