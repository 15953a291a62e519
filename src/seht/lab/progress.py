"""The progress of a run: a bar on a terminal, plain lines elsewhere, nothing inside a program; and
TensorBoard's curves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from seht.lab.records import writing


class Watch:
    """Receives the progress of a run; this one ignores it."""

    def begin(self, epochs: int, steps_per_epoch: int, step: int) -> None:
        """The run starts, or goes on, at that step."""

    def step(self, step: int) -> None:
        """So many steps are done."""

    def figures(self, means: Mapping[str, float]) -> None:
        """Means of the epoch so far: losses, trace, penalty."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is done; its row of ``metrics.csv``."""

    def close(self) -> None:
        """The run has ended, or failed."""


class Lines(Watch):
    """A line per epoch, but no more than one a second."""

    def __init__(self, label: str) -> None:
        self.label, self.last = label, 0.0

    def begin(self, epochs: int, steps_per_epoch: int, step: int) -> None:
        self.epochs = epochs
        if step:
            print(f"{self.label}: goes on at step {step:,}", flush=True)

    def epoch(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if row["epoch"] == self.epochs or now - self.last >= 1:
            self.last = now
            print(f"{self.label}: epoch {row['epoch']}/{self.epochs}, {say(row)}", flush=True)


class Bar(Watch):
    """A bar with losses, trace and the time left."""

    def __init__(self, label: str, *, transient: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[epoch]}  {task.fields[figures]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            transient=transient,
        )
        self.label = label
        self.means: dict[str, Any] = {}
        self.row: dict[str, Any] = {}
        self.task: Any = None

    def begin(self, epochs: int, steps_per_epoch: int, step: int) -> None:
        self.epochs, self.length = epochs, steps_per_epoch
        self.progress.start()
        self.task = self.progress.add_task(
            self.label, total=epochs * steps_per_epoch, completed=step, epoch="", figures=""
        )

    def step(self, step: int) -> None:
        epoch = min(self.epochs, step // self.length + 1)
        self.progress.update(self.task, completed=step, epoch=f"epoch {epoch}/{self.epochs}")

    def figures(self, means: Mapping[str, float]) -> None:
        """Show the epoch's means, beside the last validation."""
        self.means = dict(means)
        self._show()

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.row = {name: value for name, value in row.items() if name.startswith("valid")}
        self._show()

    def _show(self) -> None:
        self.progress.update(self.task, figures=say({**self.means, **self.row}))

    def close(self) -> None:
        self.progress.stop()


NAMES = {
    "train_loss": "loss",
    "valid_loss": "valid",
    "valid_top1": "top-1",
    "valid_perplexity": "perplexity",
    "trace": "trace",
    "penalty": "penalty",
}


def say(figures: Mapping[str, Any]) -> str:
    """``loss 0.1234, valid 0.2345, top-1 97.12, trace 12.3``."""
    return ", ".join(
        f"{word} {figures[name]:.4g}"
        for name, word in NAMES.items()
        if figures.get(name) is not None
    )


def make(label: str) -> Watch:
    """A bar on a terminal, lines otherwise."""
    return Bar(label) if sys.stdout.isatty() else Lines(label)


class Events:
    """TensorBoard's curves, one point per epoch; a resumed run writes anew the rows it starts with.

    torch's own writer names its file after the host and reports a full disk from another thread,
    late; this one does neither.
    """

    def __init__(self, directory: Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.directory, self.rows = directory, list(rows)
        self.file: BinaryIO | None = None

    def __enter__(self) -> Events:
        from tensorboard.compat.proto.event_pb2 import Event

        with writing(self.directory):
            for old in self.directory.glob("events.out.tfevents.*"):
                old.unlink(missing_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.seht"
            self.file = open(self.directory / name, "wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        for row in self.rows:
            self.add(row)
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """One epoch's figures."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name.replace("_", "/", 1), simple_value=value)
            for name, value in row.items()
            if name not in ("epoch", "step") and value is not None
        ]
        self._write(Event(wall_time=time.time(), step=row["epoch"], summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self.file is not None
        with writing(self.directory):
            RecordWriter(self.file).write(event.SerializeToString())
            self.file.flush()
