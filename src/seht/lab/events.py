"""TensorBoard's curves, one point per epoch.

torch's own writer names its file after the host and reports a full disk from another thread, late;
this one does neither.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from seht.lab.records import writing


class Events:
    """The run's one file of events; the rows that a resumed run starts with are written anew.

    With ``on`` false there is none: another process writes it.
    """

    def __init__(
        self, directory: Path, rows: Sequence[Mapping[str, Any]] = (), *, on: bool = True
    ) -> None:
        self.directory, self.rows, self.on = directory, list(rows), on
        self.file: BinaryIO | None = None

    def __enter__(self) -> Events:
        if not self.on:
            return self
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
