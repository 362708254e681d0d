"""Results that are kept in the cache folder as JSON, to be reused by later commands on this machine."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.cache_dir import cache_folder


def kept_path(kind: str, identity: Mapping[str, Any]) -> Path:
    """Return the path of the result with the given identity, in the folder `kind` of the cache."""
    key = json.dumps(identity, sort_keys=True, default=str)
    return cache_folder() / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def read_kept(path: Path) -> dict[str, Any]:
    """Return a kept result; {} if it is missing or damaged."""
    with suppress(OSError, ValueError):
        if isinstance(value := json.loads(path.read_text(encoding="utf-8")), dict):
            return value
    return {}


def keep(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result. Without space or permission nothing is kept, and a later command computes it again."""
    with suppress(OSError):
        AtomicFiles().make_folders(path.parent)
        AtomicFiles().swap(path, json.dumps(value, default=str).encode())
