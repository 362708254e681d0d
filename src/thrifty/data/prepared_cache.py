"""Prepared data on disk. A folder is built once and later only opened."""

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

from thrifty.core.atomic_files import refuse_full_disk
from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.data_cache import file_sha256, lock_folder
from thrifty.data.tokenizer import TOKENIZER, TextTokenizer, read_tokenizer
from thrifty.data.train_split import DataSplit

MANIFEST = "manifest.json"

HASHED = 200_000_000
"""Size of a folder in bytes. Hashes of smaller folders are verified at each opening; hashes of larger folders are
verified once a day, and after a change."""

VERIFIED = ".verified.json"
VERIFIED_FOR = 24 * 3600
"""Time in seconds for which a verification of hashes is valid."""

BYTES_OF_TEXT = 2.5
"""Bytes of text per byte of prepared tokens: a token of about 5 bytes is stored in 2 bytes."""

TRAINING_TEXT = 16_000_000
"""Number of characters of text that train a tokenizer. More text hardly changes the tokens."""


@dataclass(frozen=True)
class TokenCache:
    """An opened and verified folder of prepared tokens."""

    folder: Path
    manifest: dict
    tokenizer: TextTokenizer

    def tokens(self, part: DataSplit) -> np.ndarray:
        """Return the memory-mapped tokens (n,) of the training or held-out part."""
        return np.memmap(self.folder / f"{part}.bin", dtype=self.manifest["type"], mode="r")


def cache_key(*depends: Any) -> str:
    """Return a hash of the JSON values `depends`, which must include everything that determines the prepared data."""
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def open_or_build_tokens(
    key: str, source: str, build: Callable[[Path], None], say: Callable[[str], None], text: float = 0.0
) -> TokenCache:
    """Return the prepared tokens with cache key `key`. Build the tokens first if they are missing or damaged.

    `text` is the number of bytes of the source, if it is known.
    """
    return _open(open_or_build(key, f"the tokens of {source}", build, say, text / BYTES_OF_TEXT))


def open_or_build(
    key: str, what: str, build: Callable[[Path], None], say: Callable[[str], None], size: float = 0.0
) -> Path:
    """Return the prepared folder with cache key `key`. Build the folder first if it is missing or damaged.

    Sizes and hashes of the files agree with the manifest. Raises InfeasibleError if `size`, the expected bytes of the
    folder, are not free on its disk.
    """
    folder = cache_folder() / "prepared" / key
    if not _damage(folder):
        return folder
    with lock_folder(folder):
        damage = _damage(folder)  # check again, because another process may have built the folder meanwhile
        if damage:
            reason = f" again, since {damage}" if folder.exists() else ", once"
            fix = "export THRIFTY_CACHE=FOLDER, with a folder on a larger disk; or free space on this disk"
            refuse_full_disk(folder.parent, size, f"preparing {what} writes files", fix)
            say(f"preparing {what}{reason}: {folder}")
            build(folder)
    return folder


def refuse_less_than_a_batch(settings: DataSettings, count: int, what: str) -> None:
    """Raise UsageError for fewer training examples than one batch. `what` is a clause such as "has 3 images"."""
    if count < settings.batch:
        raise UsageError(
            f"{settings.source!r} {what} to train on, fewer than one batch of {settings.batch}",
            fix=f"lower data.batch to at most {count}",
        )


def read_manifest(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _open(folder: Path) -> TokenCache:
    return TokenCache(folder, read_manifest(folder), read_tokenizer(folder / TOKENIZER))


def _damage(folder: Path) -> str:
    """Return a description of the damage or absence of a prepared folder, or an empty string."""
    try:
        files = read_manifest(folder)["files"]
        is_large = sum(file["size"] for file in files.values()) >= HASHED
        for name, file in files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file["size"]:
                return f"{name} has another size than in the manifest"
        if is_large and _is_verified(folder, files):
            return ""
        for name, file in files.items():
            if file_sha256(folder / name) != file["sha256"]:
                return f"{name} has another sha256 than in the manifest"
        if is_large:
            _write_verified(folder, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return ""


def _is_verified(folder: Path, names: Iterable[str]) -> bool:
    try:
        record = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
        return 0 <= time.time() - record["at"] < VERIFIED_FOR and record["states"] == _states(folder, names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_verified(folder: Path, names: Iterable[str]) -> None:
    temporary = folder / f"{VERIFIED}.{os.getpid()}"
    with suppress(OSError):  # in a read-only cache, each start hashes the files again
        temporary.write_text(json.dumps({"at": time.time(), "states": _states(folder, names)}), encoding="utf-8")
        temporary.replace(folder / VERIFIED)


def _states(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    facts = {name: (folder / name).stat() for name in names}
    return {name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for name, each in facts.items()}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest of a prepared folder, with the size and sha256 of every file."""
    files = {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({**manifest, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
