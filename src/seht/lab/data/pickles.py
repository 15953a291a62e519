"""Read the CIFAR pickles without trusting them: nothing but plain values and arrays is made."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from seht.lab.data.files import DataError

# All that a pickled array needs; any other name could be a way to run code.
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


def load(path: Path) -> dict[bytes, Any]:
    """A pickled dictionary of arrays and lists; strings are bytes, as Python 2 wrote them."""
    value = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    if not isinstance(value, dict):
        raise DataError(f"{path} holds no dictionary; replace it by the official file")
    return value


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"a data file asks for {module}.{name}, which no array needs, and was not read; "
                "replace it by the official file"
            )
        import numpy

        if name == "_reconstruct":  # where it is today, whichever numpy wrote the file
            return numpy.empty(0).__reduce__()[0]
        return getattr(numpy, name)
