"""Prepared tokens: a source tokenised once into two memory-mapped files, cached under a hash of its settings.

    prepared/<key>/train.bin, held_out.bin   tokens, uint16 or uint32, each document followed by the end of text, or
                                             of pairs each source and each target
                   tokenizer.json            the tokenizer they were made with
                   manifest.json             counts, statistics, and the size and sha256 of the files

Ranks that prepare at once wait for one another and share the result. A damaged folder is noticed and built again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.data_cache import building, file_sha256, locked
from thrifty.data.text.document_sources import Source, open_source
from thrifty.data.text.near_duplicates import Distinct
from thrifty.data.text.text_pairs import SEPARATOR, PairFile
from thrifty.data.text.token_files import Stream, token_type, unigram_entropy, write_streams
from thrifty.data.tokenizer import TextTokenizer, check_vocabulary, read_tokenizer, train_tokenizer
from thrifty.data.train_split import Part, Split, plan_split

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
HASHED = 200_000_000
"""Up to this many bytes the files' hashes are verified at each opening, beyond only their sizes."""
TRAINING_TEXT = 16_000_000
"""Characters of training text that a tokenizer is trained on; more of it hardly changes the tokens found."""


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared tokens, opened and verified."""

    folder: Path
    manifest: dict
    tokenizer: TextTokenizer

    def tokens(self, part: Part) -> np.ndarray:
        """The tokens of a part (n,), memory-mapped."""
        return np.memmap(self.folder / f"{part}.bin", dtype=self.manifest["type"], mode="r")


def prepare(
    settings: DataSettings, say: Callable[[str], None], special: Sequence[str] = (), pairs: bool = False
) -> Prepared:
    """Open the prepared tokens of these settings, building them first where they are missing or damaged.

    A tokenizer that is trained has the `special` tokens besides its own. With `pairs` the source is a file of pairs.
    `length` and `batch` play no part. Raises UsageError at a setting or an input that is not what it must be.
    """
    check_settings(settings, special)
    path = Path(settings.source).expanduser()
    source = PairFile(path) if pairs else open_source(settings.source, settings.column)
    if settings.near_duplicates is not None:
        source = Distinct(source, settings.near_duplicates)
    key = _key(settings, source, special)
    return prepared_once(key, settings.source, lambda folder: _build(settings, source, special, pairs, folder), say)


def prepared_once(key: str, source: str, build: Callable[[Path], None], say: Callable[[str], None]) -> Prepared:
    """Open the prepared tokens of this key, building them first where they are missing or damaged."""
    return _open(built_once(key, f"the tokens of {source}", build, say))


def built_once(key: str, what: str, build: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """The prepared folder of this key, built first where it is missing or damaged: its files have the sizes and hashes
    that its manifest says."""
    folder = cache_folder() / "prepared" / key
    if not _damage(folder):
        return folder
    with locked(folder):
        found = _damage(folder)  # again: another process may have built it in the meantime
        if found:
            again = f" again, since {found}" if folder.exists() else ", once"
            say(f"preparing {what}{again}: {folder}")
            build(folder)
    return folder


def check_settings(settings: DataSettings, special: Sequence[str]) -> None:
    """Raises UsageError for a setting that is not what it must be."""
    if not 0 < settings.held_out < 1:
        raise UsageError(f"data.held_out is {settings.held_out}", fix="give a fraction between 0 and 1, such as 0.05")
    alike = settings.near_duplicates
    if alike is not None and not 0 < alike <= 1:
        raise UsageError(f"data.near_duplicates is {alike}", fix="give a share above 0 and at most 1, such as 0.8")
    for name in ("length", "batch"):
        if getattr(settings, name) < 1:
            raise UsageError(f"data.{name} is {getattr(settings, name)}", fix="give 1 or more")
    if not settings.tokenizer:
        check_vocabulary(settings.vocabulary, special)


def _key(settings: DataSettings, source: Source, special: Sequence[str]) -> str:
    """A hash of everything that the tokens depend on."""
    if settings.tokenizer:
        path = Path(settings.tokenizer).expanduser()
        tokenizer = file_sha256(path) if path.is_file() else ""
    else:
        tokenizer = " ".join(("trained", str(settings.vocabulary), *special))
    depends = [FORMAT, source.identity(), settings.column, tokenizer, settings.held_out]
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _open(folder: Path) -> Prepared:
    return Prepared(folder, read_manifest(folder), read_tokenizer(folder / TOKENIZER))


def _damage(folder: Path) -> str:
    """What is wrong with a prepared folder, absence included, or nothing."""
    try:
        files = read_manifest(folder)["files"]
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


def _build(settings: DataSettings, source: Source, special: Sequence[str], pairs: bool, folder: Path) -> None:
    given = read_tokenizer(Path(settings.tokenizer).expanduser()) if settings.tokenizer else None
    pieces = _pieces_of_pairs if pairs else _whole
    split = plan_split(source.documents(), settings.held_out, settings.source)
    if split.longest is not None and pairs:  # what cuts a text in two would cut a pair in two
        raise UsageError(
            f"{settings.source} has too few pairs to hold {100 * settings.held_out:g}% of them out",
            fix="give more pairs, or raise data.held_out",
        )
    texts = (piece for text in split.sample(source.documents(), TRAINING_TEXT) for piece in pieces(text))
    tokenizer = given or train_tokenizer(texts, settings.vocabulary, special)
    with building(folder) as aside:
        tokenizer.save(aside / TOKENIZER)
        streams = write_streams(split.parts(source.documents()), pieces, tokenizer, aside)
        left_out = {"near_duplicates": source.report()} if isinstance(source, Distinct) else {}
        write_manifest(aside, _manifest(settings, split, tokenizer, streams) | left_out)


def write_manifest(folder: Path, manifest: dict) -> None:
    """The manifest of a prepared folder, completed by the size and the sha256 of every file that is in it."""
    files = {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({**manifest, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _whole(text: str) -> list[str]:
    return [text]


def _pieces_of_pairs(text: str) -> list[str]:
    return text.split(SEPARATOR)


def _manifest(settings: DataSettings, split: Split, tokenizer: TextTokenizer, streams: dict[Part, Stream]) -> dict:
    train, held_out = streams[Part.TRAIN], streams[Part.HELD_OUT]
    return {
        "format": FORMAT,
        "source": settings.source,
        "column": settings.column,
        "tokenizer": settings.tokenizer or "byte-level BPE trained on the training documents",
        "vocabulary": tokenizer.vocabulary,
        "type": token_type(tokenizer),
        "split": "hash of each document" if split.longest is None else "end of the longest document",
        "documents": {part: stream.documents for part, stream in streams.items()},
        "bytes": {part: stream.bytes for part, stream in streams.items()},
        "tokens": {part: stream.tokens for part, stream in streams.items()},
        "unigram_entropy": unigram_entropy(train.counts, held_out.counts),
        "bytes_per_token": held_out.bytes / held_out.tokens,
    }
