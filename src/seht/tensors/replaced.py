"""PyTorch's own attributes, replaced while at least one thread needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Replaced:
    """Attributes of a module or class that are others while a block runs, in all threads.

    The replacements must do what the originals do wherever they are not meant.
    """

    def __init__(self, owner: Any, **replacements: Any) -> None:
        self._owner = owner
        self._replacements = replacements
        self._lock = threading.Lock()
        self._inside = 0
        self.originals = {name: getattr(owner, name) for name in replacements}

    @contextmanager
    def on(self) -> Iterator[None]:
        """They are replaced while the block runs."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self.originals = {name: getattr(self._owner, name) for name in self.originals}
                for name, value in self._replacements.items():
                    setattr(self._owner, name, value)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    for name, value in self.originals.items():
                        setattr(self._owner, name, value)
