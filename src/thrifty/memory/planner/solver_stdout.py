"""Suppression of output that a solver always prints."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_stdout() -> Iterator[None]:
    """Suppress standard output inside the `with` block. HiGHS prints lines even if output is switched off.

    Standard output of a command may be one JSON document, which these lines would break.
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
