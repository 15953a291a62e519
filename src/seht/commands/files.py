"""Files that a command writes: complete or not at all, and never over files of others."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import seht
from seht import extras
from seht.errors import UsageError

MARKS = (b'<meta name="generator" content="seht">', b'"seht": "', b"`seht bench", b"seht bench")
"""Every page, JSON file, Markdown file and picture that we write begins with one of these."""
_HEAD = 1 << 16
SUFFIX = ".part"
"""The suffix of a file while it is being written."""


def check_outputs(*files: str | None) -> None:
    """``ValueError`` unless every file can be written, and is new, empty or one of ours."""
    seen: dict[Path, str] = {}
    for file in files:
        if file is None or file == "-":
            continue
        path = Path(file).absolute()
        if not path.parent.is_dir():
            raise ValueError(f"cannot write {file!r}: there is no such directory")
        if path in seen:
            raise ValueError(f"{file!r} is to be written twice; give two names")
        seen[path] = file
        if path.is_dir():
            raise ValueError(f"cannot write {file!r}: it is a directory")
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise ValueError(f"cannot write {file!r}: it is not an ordinary file")
        if path.exists() and not _ours(path):
            raise ValueError(
                f"{file!r} is there and was not written by seht; give another name, or remove it"
            )


def _ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return not head or any(mark in head for mark in MARKS)


def put(path: Path, data: bytes) -> None:
    """All of the data under that name, or nothing."""
    part = path.with_name(path.name + SUFFIX)
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def put_text(file: str | Path, text: str) -> None:
    """The same for text; what the system says against it becomes one line."""
    try:
        put(Path(file), text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {str(file)!r}: {error.strerror or error}") from error


@dataclass(frozen=True)
class ReportFiles:
    """What ``--json`` (``-`` is standard output) and ``--html`` name, checked before any work."""

    json: str | None = None
    html: str | None = None

    def __post_init__(self) -> None:
        try:
            check_outputs(self.json, self.html)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if self.html is not None:
            extras.need("measure", "the page", "jinja2", "matplotlib")

    def write(self, table: object, record: Mapping[str, Any], page: Callable[[Any], str]) -> None:
        """Print the table (or the record), and write the files; ``page`` takes the versions."""
        python = ("Python", platform.python_version())
        versions = [("seht", seht.__version__), ("torch", torch.__version__), python]
        if self.json is not None:
            text = json.dumps({"versions": dict(versions), **record}, indent=2, allow_nan=False)
            if self.json == "-":
                print(text)
            else:
                put_text(self.json, text + "\n")
        if self.json != "-":
            print(table)
        if self.html is not None:
            put_text(self.html, page(versions))
            if self.json != "-":
                print(f"\n{self.html}")
