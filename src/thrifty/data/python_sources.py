"""The text set that every machine has: the Python sources of the running standard library and of torch."""

import hashlib
import importlib.util
import os
import sysconfig
from pathlib import Path

SIZE = 40_000_000
"""Bytes of source text taken at most."""
PASSED_OVER = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_files(size: int = SIZE) -> tuple[Path, ...]:
    """The standard library's .py files and then torch's, up to `size` bytes, without tests; sorted by path.

    Torch's are taken in the order of a hash of their names, so that the cut spreads over the whole library.
    """
    library, torch = Path(sysconfig.get_path("stdlib")), _torch_folder()
    scattered = sorted(_sources(torch), key=lambda path: _name_hash(path.relative_to(torch)))
    chosen: list[Path] = []
    for path in _sources(library) + scattered:
        size -= path.stat().st_size
        if size < 0:
            break
        chosen.append(path)
    return tuple(sorted(chosen))


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torch has no folder of sources")
    return Path(found.origin).parent


def _sources(root: Path) -> list[Path]:
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - PASSED_OVER)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _name_hash(path: Path) -> bytes:
    return hashlib.blake2b(path.as_posix().encode()).digest()
