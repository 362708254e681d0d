"""Results that several tests look at, computed by one worker of a test run and read by the others."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")
FOLDER = "THRIFTY_TEST_RESULTS"


def shared_folder() -> Path:
    """The folder that all workers of this test run have in common."""
    return Path(os.environ[FOLDER])


def computed_once(name: str, compute: Callable[[], T]) -> T:
    """Return the result of this name, computed by the worker that asks first while the others wait. A failure is not
    kept; the file comes from this very test run."""
    path = shared_folder() / hashlib.sha256(name.encode()).hexdigest()[:24]
    with FileLock(f"{path}.lock"):
        if path.exists():
            return pickle.loads(path.read_bytes())  # noqa: S301
        result = compute()
        path.write_bytes(pickle.dumps(result))
        return result
