"""What needs more than torch lies in the extra ``seht[measure]`` and is imported when used."""

from __future__ import annotations

import importlib


class MissingExtraError(ImportError):
    """A package of the extra is not installed."""


def need(*names: str) -> None:
    """Raise an error that says what to install, where a package is missing."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"this measurement needs {name}: pip install 'seht[measure]'", name=name
            ) from error
