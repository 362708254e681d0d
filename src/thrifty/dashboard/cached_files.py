"""Cache of small parsed files of run folders and results. A file is reread only after it has changed."""

import json
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thrifty.reporting.run_record import mapping

LARGEST = 8 << 20
"""Maximum number of bytes of a file. A larger file counts as unreadable."""


class CachedFiles:
    """Parsed files by path. The value is None if a file is missing, too large or invalid."""

    def __init__(self) -> None:
        self._parsed: dict[Path, tuple[tuple[int, int], Any]] = {}

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
            entry = self._parsed.get(path)
            if entry is None or entry[0] != mark:
                value = parse(path.read_bytes()) if status.st_size <= LARGEST else None
                self._parsed[path] = entry = mark, value
            return entry[1]
        except (OSError, ValueError, RecursionError):
            return None
