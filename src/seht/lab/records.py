"""What a run leaves on disk: its configuration, its metrics, its result.

Every file is written beside its name and moved there when it is complete, so that a reader, or a
process that starts after a kill, sees the old file or the new one and nothing in between.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from seht.commands.files import SUFFIX, put
from seht.errors import UsageError


class RunError(UsageError):
    """A run directory that cannot be used, said in one line with what to do about it."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into one line."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise RunError(
            f"cannot write {path}: {what}; make room there or choose another directory with --out, "
            "then run the same command again: it continues"
        ) from error


def write(path: Path, content: bytes | str) -> None:
    """All of the content under that name, or nothing."""
    with writing(path):
        put(path, content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Plain data; a number that is not finite would not be JSON and is a mistake of the caller."""
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def loads(text: str) -> Any:
    """JSON that we could have written; whatever else is a ``ValueError``."""

    def whole(digits: str) -> int:
        if len(digits) > 300:  # no float, which sizes and figures become
            raise ValueError("a number is too large")
        return int(digits)

    try:
        found = json.loads(text, parse_int=whole)
        json.dumps(found, ensure_ascii=False).encode()  # half a character cannot be written
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found


def read_json(path: Path) -> Any:
    """A JSON object, or ``None`` where there is no such file."""
    try:
        found = loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        return found
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise RunError(
            f"{path} cannot be read ({error}); it is damaged: remove it, and the command that "
            "wrote it writes it again"
        ) from error


def fingerprint(value: Any) -> str:
    """A checksum of plain data that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """The versions that a figure may depend on; no paths, no hosts."""
    import torch

    import seht

    return {
        "seht": seht.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Result:
    """What a run ended with; metrics are percentages, losses or perplexities."""

    status: str
    """``done`` or ``failed``."""
    reason: str | None
    method: str
    seed: int
    epochs: int
    steps: int
    seconds: float
    """Of training steps, without evaluation."""
    metrics: dict[str, dict[str, float]]
    """``last`` and ``best`` (on the validation split, with its ``epoch``)."""
    trace: dict[str, float] | None = None
    """Of the training loss: ``estimate``, ``stderr``, ``probes``."""
    weight_norm: float | None = None
    train_loss: float | None = None
    """Of the last weights, as on the other splits; ``metrics.csv`` has the mean over an epoch's
    steps instead, with dropout and augmentation, while the weights change."""
    eigenvalues: dict[str, Any] | None = None
    """Of the training loss's Hessian, ``largest`` and ``smallest``, each with its residual; bounds
    where ``converged`` is false."""
    stability: dict[str, Any] | None = None
    """Of gradient flow at the end: ``verdict``, whether it is an ``equilibrium``, or a reason."""
    paths: dict[str, Any] | None = None
    """Of tuned weights, by method: what ``seht.WeightPath.state()`` wrote down."""
    wrong_labels: dict[str, float] | None = None
    """Where labels were replaced: the fraction that is wrong, of ``train`` and ``valid``."""

    @property
    def done(self) -> bool:
        """The run has reached its end."""
        return self.status == "done"


def check_result(result: Result) -> None:
    """``ValueError`` unless it says what a result says."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "method": str,
        "seed": int,
        "epochs": int,
        "steps": int,
        "seconds": (int, float),
        "metrics": dict,
        "reason": (str, type(None)),
    }
    for name, kind in kinds.items():
        value = getattr(result, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its {name} is {value!r:.60}")
    if result.status not in ("done", "failed"):
        raise ValueError(f"its status is {result.status!r:.60}")
    wanted = {"last", "best"} if result.done else set()
    if not wanted <= result.metrics.keys():
        raise ValueError("it says done but has no metrics")
    for which, figures in result.metrics.items():
        if not isinstance(figures, dict) or not all(
            isinstance(figure, (int, float)) and not isinstance(figure, bool)
            for figure in figures.values()
        ):
            raise ValueError(f"its {which} metrics are not numbers")


class Record:
    """One run's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoint = directory / "checkpoint.pt"
        self.model = directory / "model.pt"

    def claim(self, config: dict[str, Any]) -> None:
        """Make the directory this run's, or see that it is; to be called under its lock."""
        for part in self.directory.glob("*" + SUFFIX):  # left by a process that was killed
            part.unlink(missing_ok=True)
        if not self.check(config):
            write_json(self.directory / "config.json", {**config, "versions": versions()})

    def check(self, config: dict[str, Any]) -> bool:
        """Whether the directory is this run's; ``False`` if it is unused, an error otherwise."""
        there = read_json(self.directory / "config.json")
        one = {"ranks": 1}  # which a record does not mention
        other = None if there is None else difference({**one, **config}, {**one, **there})
        if other is not None:
            raise RunError(
                f"{self.directory} holds another run ({other}); choose another directory with "
                "--out, or remove that one"
            )
        return there is not None

    def result(self) -> Result | None:
        """What the run ended with; ``None`` while it has not."""
        path = self.directory / "result.json"
        found = read_json(path)
        if found is None:
            return None
        try:
            # What came later than the record is missing there, and has a default.
            known = [field.name for field in fields(Result) if field.name in found]
            result = Result(**{name: found[name] for name in known})
            check_result(result)
            return result
        except (TypeError, ValueError) as error:
            raise RunError(
                f"{path} is not a result of this version of seht ({error}); remove it, and the "
                "same command makes it again"
            ) from error

    def ended(self, config: dict[str, Any], retry: bool) -> Result | None:
        """This run's result, if it has one; with ``retry`` a failed one is removed."""
        result = self.result() if self.check(config) else None
        if result is None or result.done or not retry:
            return result
        self.forget()
        return None

    def forget(self) -> None:
        """Make a run that has ended one that has not begun."""
        with writing(self.directory):
            for file in (self.checkpoint, self.model, self.directory / "metrics.csv"):
                file.unlink(missing_ok=True)
            (self.directory / "result.json").unlink(missing_ok=True)  # last: until then it is over

    def metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """All rows anew: those of epochs that a resumed run repeats are replaced."""
        rows = list(rows)
        text = io.StringIO()
        if rows:
            table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        write(self.directory / "metrics.csv", text.getvalue())

    def finish(self, result: Result) -> None:
        """Written last: from here on the run is done."""
        write_json(self.directory / "result.json", asdict(result))
        with suppress(OSError):
            self.checkpoint.unlink(missing_ok=True)


def read_metrics(file: Path) -> dict[str, list[float]]:
    """The columns of a ``metrics.csv``, NaN where a cell is empty; none where there is no file."""
    try:
        header, *rows = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8")))) or [[]]
        whole = [row for row in rows if len(row) == len(header)]  # not one that was cut short
        return {
            name: [float(cell) if cell else math.nan for cell in cells]
            for name, cells in zip(header, zip(*whole, strict=True), strict=False)
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(
            f"{str(file)!r} is not a table of numbers; delete it, and `seht compare` makes it again"
        ) from error


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first of our fields that is another there: ``epochs is 3 there, 5 here``."""
    for key, value in ours.items():
        other = theirs.get(key) if isinstance(theirs, Mapping) else None
        if key == "seal" and other != value:
            return "its data file was another one, or has changed since"
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found = difference(value, other, f"{prefix}{key}.")
            extra = [k for k in other if k not in value]
            if found is not None:
                return found
            if extra:
                return f"{prefix}{key}.{extra[0]} is {other[extra[0]]!r} there, not set here"
        elif plain(value) != other:
            return f"{prefix}{key} is {other!r} there, {value!r} here"
    return None


def plain(value: Any) -> Any:
    """A value as JSON would give it back: tuples become lists."""
    return json.loads(json.dumps(value))
