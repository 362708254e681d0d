"""Prepared data on disk: open a finished folder, or build it once."""

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
"""Up to this many bytes the files' hashes are verified at each opening; beyond it once a day and when touched."""

VERIFIED = ".verified.json"
VERIFIED_FOR = 24 * 3600
"""Seconds."""

TRAINING_TEXT = 16_000_000
"""Characters of training text that a tokenizer is trained on; more of it hardly changes the tokens found."""


@dataclass(frozen=True)
class TokenCache:
    """A folder of prepared tokens, opened and verified."""

    folder: Path
    manifest: dict
    tokenizer: TextTokenizer

    def tokens(self, part: DataSplit) -> np.ndarray:
        """The tokens of a part (n,), memory-mapped."""
        return np.memmap(self.folder / f"{part}.bin", dtype=self.manifest["type"], mode="r")


def cache_key(*depends: Any) -> str:
    """A hash of all that prepared data depend on, in plain JSON values."""
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def open_or_build_tokens(
    key: str, source: str, build: Callable[[Path], None], say: Callable[[str], None]
) -> TokenCache:
    """Open the prepared tokens of this key, building them first where they are missing or damaged."""
    return _open(open_or_build(key, f"the tokens of {source}", build, say))


def open_or_build(key: str, what: str, build: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """The prepared folder of this key, built first where it is missing or damaged: its files have the sizes and hashes
    that its manifest says."""
    folder = cache_folder() / "prepared" / key
    if not _damage(folder):
        return folder
    with lock_folder(folder):
        damage = _damage(folder)  # again: another process may have built it in the meantime
        if damage:
            again = f" again, since {damage}" if folder.exists() else ", once"
            say(f"preparing {what}{again}: {folder}")
            build(folder)
    return folder


def refuse_less_than_a_batch(settings: DataSettings, count: int, what: str) -> None:
    """Raises UsageError where there are so few examples to train on; `what` says of how many ("has 3 images")."""
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
    """What is wrong with a prepared folder, absence included, or nothing."""
    try:
        files = read_manifest(folder)["files"]
        is_large = sum(file["size"] for file in files.values()) >= HASHED
        for name, file in files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file["size"]:
                return f"{name} has not its size"
        if is_large and _is_verified(folder, files):
            return ""
        for name, file in files.items():
            if file_sha256(folder / name) != file["sha256"]:
                return f"{name} has not its sha256"
        if is_large:
            _keep_verified(folder, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return ""


def _is_verified(folder: Path, names: Iterable[str]) -> bool:
    """Return True if the hashes were verified within the last day and no file was touched since."""
    try:
        kept = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
        return 0 <= time.time() - kept["at"] < VERIFIED_FOR and kept["states"] == _states(folder, names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _keep_verified(folder: Path, names: Iterable[str]) -> None:
    aside = folder / f"{VERIFIED}.{os.getpid()}"
    with suppress(OSError):  # of a cache that is only read, files are hashed at each start
        aside.write_text(json.dumps({"at": time.time(), "states": _states(folder, names)}), encoding="utf-8")
        aside.replace(folder / VERIFIED)


def _states(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    facts = {name: (folder / name).stat() for name in names}
    return {name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for name, each in facts.items()}


def write_manifest(folder: Path, manifest: dict) -> None:
    """The manifest of a prepared folder, completed by the size and the sha256 of every file that is in it."""
    files = {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({**manifest, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
