"""Progress messages of public functions on standard error."""

import sys
from collections.abc import Callable


def progress(quiet: bool = False, prefix: str = "") -> Callable[[str], None]:
    """Return a function that prints a line to standard error, or a function without effect if `quiet`."""
    return (lambda text: None) if quiet else (lambda text: print(prefix + text, file=sys.stderr, flush=True))
