"""Suppression of the output that a solver prints unconditionally."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_stdout() -> Iterator[None]:
    """Redirect standard output inside the block, because HiGHS prints lines even if output is switched off.

    Standard output may be one JSON document.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    original, devnull = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(original, 1)
        os.close(original)
        os.close(devnull)
