"""Small files of run folders and results, read again only when they have changed, and never more than is sensible."""

import json
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thrifty.reporting.run_record import mapping

LARGEST = 8 << 20
"""Bytes of a file that is read as a whole; a larger one counts as unreadable."""


class CachedFiles:
    """Parsed files by path. What is missing, too large or not what it should be is None."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], Any]] = {}

    def json(self, path: Path) -> Any:
        return self._read(path, json.loads)

    def toml(self, path: Path) -> Mapping[str, Any]:
        return self._read(path, lambda content: tomllib.loads(content.decode())) or {}

    def json_object(self, path: Path) -> Mapping[str, Any]:
        return mapping(self.json(path))

    def _read(self, path: Path, parse: Callable[[bytes], Any]) -> Any:
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return None
            mark = status.st_mtime_ns, status.st_size
            known = self._known.get(path)
            if known is None or known[0] != mark:
                value = parse(path.read_bytes()) if status.st_size <= LARGEST else None
                self._known[path] = known = mark, value
            return known[1]
        except (OSError, ValueError, RecursionError):
            return None
