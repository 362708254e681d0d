"""Prepared data on disk: a folder is built once and then opened."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.data_cache import file_sha256, lock_folder
from thrifty.data.tokenizer import TOKENIZER, TextTokenizer, read_tokenizer
from thrifty.data.train_split import DataSplit

MANIFEST = "manifest.json"

HASHED = 200_000_000
"""Bytes up to which file hashes are verified at each opening; larger folders once a day and after a change."""

VERIFIED = ".verified.json"
VERIFIED_FOR = 24 * 3600
"""Seconds that a verification of hashes is valid."""

TRAINING_TEXT = 16_000_000
"""Characters of training text for a tokenizer; more text hardly changes the tokens."""


@dataclass(frozen=True)
class TokenCache:
    """A folder of prepared tokens, opened and verified."""

    folder: Path
    manifest: dict
    tokenizer: TextTokenizer

    def tokens(self, part: DataSplit) -> np.ndarray:
        """Return the memory-mapped tokens of a part (n,)."""
        return np.memmap(self.folder / f"{part}.bin", dtype=self.manifest["type"], mode="r")


def cache_key(*depends: Any) -> str:
    """Return a hash of everything that prepared data depend on, as plain JSON values."""
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def open_or_build_tokens(
    key: str, source: str, build: Callable[[Path], None], say: Callable[[str], None]
) -> TokenCache:
    """Return the prepared tokens of this key, built first if they are missing or damaged."""
    return _open(open_or_build(key, f"the tokens of {source}", build, say))


def open_or_build(key: str, what: str, build: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Return the prepared folder of this key, built first if it is missing or damaged.

    Its files have the sizes and hashes of the manifest.
    """
    folder = cache_folder() / "prepared" / key
    if not _damage(folder):
        return folder
    with lock_folder(folder):
        damage = _damage(folder)  # checked again, because another process may have built it in the meantime
        if damage:
            reason = f" again, since {damage}" if folder.exists() else ", once"
            say(f"preparing {what}{reason}: {folder}")
            build(folder)
    return folder


def refuse_less_than_a_batch(settings: DataSettings, count: int, what: str) -> None:
    """Raise UsageError for fewer training examples than one batch; `what` is a clause such as "has 3 images"."""
    if count < settings.batch:
        raise UsageError(
            f"{settings.source} {what} to train on, fewer than one batch of {settings.batch}",
            fix=f"lower data.batch to at most {count}",
        )


def read_manifest(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _open(folder: Path) -> TokenCache:
    return TokenCache(folder, read_manifest(folder), read_tokenizer(folder / TOKENIZER))


def _damage(folder: Path) -> str:
    """Return the damage of a prepared folder, including its absence, or an empty string."""
    try:
        files = read_manifest(folder)["files"]
        is_large = sum(file["size"] for file in files.values()) >= HASHED
        for name, file in files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file["size"]:
                return f"{name} has another size than its manifest"
        if is_large and _is_verified(folder, files):
            return ""
        for name, file in files.items():
            if file_sha256(folder / name) != file["sha256"]:
                return f"{name} has another sha256 than its manifest"
        if is_large:
            _write_verified(folder, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return ""


def _is_verified(folder: Path, names: Iterable[str]) -> bool:
    """Return True if the hashes were verified within the last day and no file has changed since."""
    try:
        record = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
        return 0 <= time.time() - record["at"] < VERIFIED_FOR and record["states"] == _states(folder, names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_verified(folder: Path, names: Iterable[str]) -> None:
    temporary = folder / f"{VERIFIED}.{os.getpid()}"
    with suppress(OSError):  # in a read-only cache, files are hashed at each start
        temporary.write_text(json.dumps({"at": time.time(), "states": _states(folder, names)}), encoding="utf-8")
        temporary.replace(folder / VERIFIED)


def _states(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    facts = {name: (folder / name).stat() for name in names}
    return {name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for name, each in facts.items()}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest of a prepared folder, with the size and the sha256 of every file in it."""
    files = {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({**manifest, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
