"""Memory that is freed stays with the process while steps are timed.

The C library gives large blocks back to the system at once, and the next step gets them page by
page, at the price of a pass over them. How high that is depends on the machine's state more than on
what is measured: the Gauss-Newton step of the LSTM took 2.4 or 3.0 plain steps an hour apart.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def keep_memory() -> bool:
    """For this process, from now on; whether the C library (glibc) can do it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    options = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 28}
    return all([mallopt(option, value) for option, value in options.items()])
