"""Prepared tokens: a source tokenised once into two memory-mapped files, cached under a hash of its settings.

    prepared/<key>/train.bin, held_out.bin   tokens, uint16 or uint32, each document followed by the end of text
                   tokenizer.json            the tokenizer they were made with
                   manifest.json             counts, statistics, and the size and sha256 of the files

Ranks that prepare at once wait for one another and share the result. A damaged folder is noticed and built again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.cache import building, cache_folder, file_sha256, locked
from thrifty.data.documents import Source, open_source
from thrifty.data.splitting import Part, Split, plan_split
from thrifty.data.tokenizing import SMALLEST, TextTokenizer, read_tokenizer, train_tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
HASHED = 200_000_000
"""Up to this many bytes the files' hashes are verified at each opening, beyond only their sizes."""
TRAINING_TEXT = 16_000_000
"""Characters of training text that a tokenizer is trained on; more of it hardly changes the tokens found."""
AT_ONCE = 1_000_000
"""Characters tokenised together."""


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared tokens, opened and verified."""

    folder: Path
    manifest: dict
    tokenizer: TextTokenizer

    def tokens(self, part: Part) -> np.ndarray:
        """The tokens of a part (n,), memory-mapped."""
        return np.memmap(self.folder / f"{part}.bin", dtype=self.manifest["type"], mode="r")


def prepare(settings: DataSettings, say: Callable[[str], None]) -> Prepared:
    """Open the prepared tokens of these settings, building them first where they are missing or damaged.

    `length` and `batch` play no part. Raises UsageError at a setting or an input that is not what it must be.
    """
    _check(settings)
    source = open_source(settings.source, settings.column)
    folder = cache_folder() / "prepared" / _key(settings, source)
    if not _damage(folder):
        return _open(folder)
    with locked(folder):
        found = _damage(folder)  # again: another process may have built it in the meantime
        if found:
            again = f" again, since {found}" if folder.exists() else ", once"
            say(f"preparing the tokens of {settings.source}{again}: {folder}")
            _build(settings, source, folder)
    return _open(folder)


def _check(settings: DataSettings) -> None:
    if not 0 < settings.held_out < 1:
        raise UsageError(f"data.held_out is {settings.held_out}", fix="give a fraction between 0 and 1, such as 0.05")
    for name in ("length", "batch"):
        if getattr(settings, name) < 1:
            raise UsageError(f"data.{name} is {getattr(settings, name)}", fix="give 1 or more")
    if not settings.tokenizer and settings.vocabulary < SMALLEST:
        raise UsageError(
            f"data.vocabulary is {settings.vocabulary}, fewer than the 256 bytes and the end of text",
            fix=f"raise data.vocabulary to {SMALLEST} or more",
        )


def _key(settings: DataSettings, source: Source) -> str:
    """A hash of everything that the tokens depend on."""
    if settings.tokenizer:
        path = Path(settings.tokenizer).expanduser()
        tokenizer = file_sha256(path) if path.is_file() else ""
    else:
        tokenizer = f"trained {settings.vocabulary}"
    depends = [FORMAT, source.identity(), settings.column, tokenizer, settings.held_out]
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def _open(folder: Path) -> Prepared:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return Prepared(folder, manifest, read_tokenizer(folder / TOKENIZER))


def _damage(folder: Path) -> str:
    """What is wrong with a prepared folder, absence included, or nothing."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        small = sum(file["size"] for file in files.values()) < HASHED
        for name, file in files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file["size"]:
                return f"{name} has not its size"
            if small and file_sha256(path) != file["sha256"]:
                return f"{name} has not its sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return ""


def _build(settings: DataSettings, source: Source, folder: Path) -> None:
    given = read_tokenizer(Path(settings.tokenizer).expanduser()) if settings.tokenizer else None
    split = plan_split(source.documents(), settings.held_out, settings.source)
    tokenizer = given or train_tokenizer(split.sample(source.documents(), TRAINING_TEXT), settings.vocabulary)
    with building(folder) as aside:
        tokenizer.save(aside / TOKENIZER)
        streams = _write_streams(source, split, tokenizer, aside)
        manifest = _manifest(settings, split, tokenizer, streams)
        manifest["files"] = {
            path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(aside.iterdir())
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class Stream:
    """A file of tokens being written, with what is counted on the way."""

    def __init__(self, path: Path, tokenizer: TextTokenizer):
        self.file = path.open("wb")
        self.end_of_text = tokenizer.end_of_text
        self.type = _token_type(tokenizer)
        self.counts = np.zeros(tokenizer.vocabulary, dtype=np.int64)
        self.documents = self.bytes = 0

    def add(self, texts: list[str], encoded: list[list[int]]) -> None:
        """Append documents and their tokens."""
        numbers = np.fromiter((token for tokens in encoded for token in (*tokens, self.end_of_text)), dtype=self.type)
        self.file.write(numbers.tobytes())
        self.counts += np.bincount(numbers, minlength=len(self.counts))
        self.documents += len(texts)
        self.bytes += sum(len(text.encode()) for text in texts)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def _write_streams(source: Source, split: Split, tokenizer: TextTokenizer, aside: Path) -> dict[Part, Stream]:
    streams = {part: Stream(aside / f"{part}.bin", tokenizer) for part in Part}
    try:
        for group in _groups(split.parts(source.documents())):
            encoded = tokenizer.encode_batch([text for _, text in group])
            for part, stream in streams.items():
                mine = [number for number, (belongs, _) in enumerate(group) if belongs is part]
                stream.add([group[number][1] for number in mine], [encoded[number] for number in mine])
    finally:
        for stream in streams.values():
            stream.file.close()
    return streams


def _groups(parts: Iterator[tuple[Part, str]]) -> Iterator[list[tuple[Part, str]]]:
    """Consecutive pieces of text, together at least AT_ONCE characters."""
    for first in parts:
        group, size = [first], len(first[1])
        while size < AT_ONCE and (following := next(parts, None)):
            group.append(following)
            size += len(following[1])
        yield group


def _manifest(settings: DataSettings, split: Split, tokenizer: TextTokenizer, streams: dict[Part, Stream]) -> dict:
    train, held_out = streams[Part.TRAIN], streams[Part.HELD_OUT]
    return {
        "format": FORMAT,
        "source": settings.source,
        "column": settings.column,
        "tokenizer": settings.tokenizer or "byte-level BPE trained on the training documents",
        "vocabulary": tokenizer.vocabulary,
        "type": _token_type(tokenizer),
        "split": "hash of each document" if split.longest is None else "end of the longest document",
        "documents": {part: stream.documents for part, stream in streams.items()},
        "bytes": {part: stream.bytes for part, stream in streams.items()},
        "tokens": {part: stream.tokens for part, stream in streams.items()},
        "unigram_entropy": _unigram_entropy(train.counts, held_out.counts),
        "bytes_per_token": held_out.bytes / held_out.tokens,
    }


def _token_type(tokenizer: TextTokenizer) -> str:
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def _unigram_entropy(train: np.ndarray, held_out: np.ndarray) -> float:
    """Nats per held-out token under the training frequencies, each count raised by one (Laplace 1812)."""
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_probability).sum() / held_out.sum())
