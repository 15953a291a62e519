"""Keeps freed memory in the process while steps are timed.

The C library returns large blocks to the system at once, and the next step has to get them back
page by page. What that costs depends more on the state of the machine than on the step: the
Gauss-Newton step of the LSTM took 2.4 plain steps, and an hour later 3.0.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def keep_memory() -> bool:
    """Keep freed memory from now on; returns whether the C library (glibc) can do it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    options = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 28}
    return all([mallopt(option, value) for option, value in options.items()])
