"""Token cache: two memory-mapped files of tokens per source. The folder name is a hash of source and settings.

    prepared/<key>/train.bin, held_out.bin   tokens, uint16 or uint32. An end-of-text token follows each document,
                                             and each source and target of a pair
                   tokenizer.json            the tokenizer
                   manifest.json             counts, statistics, and the size and sha256 of the files

If several ranks need the same data, one rank prepares them and the others wait. A damaged folder is rebuilt.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.prepared_cache import (
    TRAINING_TEXT,
    TokenCache,
    cache_key,
    open_or_build_tokens,
    write_manifest,
)
from thrifty.data.text.document_sources import TEXT, DocumentSource, open_source
from thrifty.data.text.near_duplicates import DeduplicatedSource
from thrifty.data.text.repeated_text import caution_on_repeated, repeated_share
from thrifty.data.text.text_pairs import SEPARATOR, PairFile
from thrifty.data.text.token_files import token_type, unigram_entropy, write_streams
from thrifty.data.tokenizer import check_vocabulary, read_tokenizer, train_tokenizer
from thrifty.data.train_split import DataSplit, SplitPlan, plan_split

FORMAT = 1
SCANT = 0.5
"""Fraction of the asked held-out size below which a caution is given."""


def open_token_cache(
    settings: DataSettings,
    say: Callable[[str], None],
    special: Sequence[str] = (),
    pairs: bool = False,
    source: DocumentSource | None = None,
) -> TokenCache:
    """Return the prepared tokens for `settings`. Build the tokens first if they are missing or damaged.

    A trained tokenizer also has the `special` tokens. With `pairs`, the source is a file of pairs. `source` is a source
    of `open_sources`. The settings `length` and `batch` have no effect. With `near_duplicates`, documents of the
    held-out source are not repeated. Raises UsageError for an invalid setting or input.
    """
    if not settings.tokenizer:
        check_vocabulary(settings.vocabulary, special)
    held_out = _open(settings.held_out_source, settings, pairs) if settings.held_out_source else None
    source = source or _distinct(_open(settings.source, settings, pairs), settings, held_out)
    key = _key(settings, source, held_out, special)
    size = source.size() + (held_out.size() if held_out else 0)
    prepared = open_or_build_tokens(
        key, settings.source, lambda folder: _build(settings, source, held_out, special, pairs, folder), say, size
    )
    if left_out := prepared.manifest.get("left_out"):  # older manifests lack this field
        say(left_out)
    for caution in cautions_of(prepared):
        say(caution)
    return prepared


def open_sources(settings: DataSettings) -> list[DocumentSource]:
    """Return the sources of a mixture. With `near_duplicates`, a source does not repeat documents of earlier ones."""
    sources: list[DocumentSource] = []
    for name in settings.sources:
        sources.append(_distinct(_open(name, settings, False), settings, sources[-1] if sources else None))
    return sources


def cautions_of(prepared: TokenCache) -> list[str]:
    """Return cautions that restrict the meaning of a loss on the held-out part."""
    manifest = prepared.manifest
    asked, tokens = manifest.get("held_out", 0.0), manifest["tokens"]
    share = tokens[DataSplit.HELD_OUT] / sum(tokens.values())
    scant = (
        f"only {share:.1%} of the text is held out instead of {asked:.1%}, because it has few documents, so losses on "
        "it are uncertain: raise data.held_out, or name a file with --held-out"
    )
    return [*caution_on_repeated(manifest.get("repeated", 0.0)), *([scant] if share < SCANT * asked else [])]


def _open(source: str, settings: DataSettings, pairs: bool) -> DocumentSource:
    return PairFile(Path(source).expanduser()) if pairs else open_source(source, settings.column)


def _distinct(source: DocumentSource, settings: DataSettings, earlier: DocumentSource | None) -> DocumentSource:
    """Return a source without near-duplicates if they are to be left out."""
    share = settings.near_duplicates
    return source if share is None else DeduplicatedSource(source, share, earlier)


def _key(
    settings: DataSettings, source: DocumentSource, held_out: DocumentSource | None, special: Sequence[str]
) -> str:
    if settings.tokenizer:
        path = Path(settings.tokenizer).expanduser()
        tokenizer = file_sha256(path) if path.is_file() else ""
    else:
        tokenizer = " ".join(("trained", str(settings.vocabulary), *special))
    judged = held_out.identity() if held_out else settings.held_out
    return cache_key(FORMAT, source.identity(), settings.column or TEXT, tokenizer, judged)


def _build(
    settings: DataSettings,
    source: DocumentSource,
    held_out_source: DocumentSource | None,
    special: Sequence[str],
    pairs: bool,
    folder: Path,
) -> None:
    sources = [each for each in (source, held_out_source) if each]
    identities = [each.identity() for each in sources]
    own_tokenizer = read_tokenizer(Path(settings.tokenizer).expanduser()) if settings.tokenizer else None
    pieces: Callable[[str], list[str]] = (lambda text: text.split(SEPARATOR)) if pairs else (lambda text: [text])
    fraction = 0.0 if held_out_source else settings.held_out
    split = plan_split(source.documents(), fraction, settings.source, lambda text: pieces(text)[0])
    held_out_texts = held_out_source.documents() if held_out_source else ()
    if split.longest is not None and pairs:  # cutting the longest document would cut a pair
        raise UsageError(
            f"{settings.source!r} has too few pairs to hold {100 * settings.held_out:g}% of them out",
            fix="add pairs; or raise data.held_out",
        )
    texts = (piece for text in split.sample(source.documents(), TRAINING_TEXT) for piece in pieces(text))
    tokenizer = own_tokenizer or train_tokenizer(texts, settings.vocabulary, special)
    with build_folder(folder) as temporary:
        tokenizer.save(temporary)
        parts = chain(split.parts(source.documents()), ((DataSplit.HELD_OUT, text) for text in held_out_texts))
        streams = write_streams(parts, pieces, tokenizer, temporary)
        train, held_out = streams[DataSplit.TRAIN], streams[DataSplit.HELD_OUT]
        if held_out_source and not held_out.tokens:
            raise UsageError(
                f"{settings.held_out_source!r} has no text to evaluate on", fix="--held-out FILE, a file with text"
            )
        if [each.identity() for each in sources] != identities or not (train.tokens and held_out.tokens):
            raise UsageError(
                f"{settings.source!r} changed while it was read", fix="start again when no process writes to it"
            )
        manifest = {
            "format": FORMAT,
            "source": settings.source,
            "column": settings.column or TEXT,
            "tokenizer": settings.tokenizer or "byte-level BPE trained on the training documents",
            "vocabulary": tokenizer.vocabulary,
            "type": token_type(tokenizer),
            "split": _split_in_words(split, settings.held_out_source),
            "documents": {part: stream.documents for part, stream in streams.items()},
            "bytes": {part: stream.bytes for part, stream in streams.items()},
            "tokens": {part: stream.tokens for part, stream in streams.items()},
            "unigram_entropy": unigram_entropy(train.counts, held_out.counts),
            "bytes_per_token": held_out.bytes / held_out.tokens,
            "left_out": source.left_out(),
        }
        if held_out_source is None:
            manifest["held_out"] = settings.held_out
        else:
            manifest["repeated"] = repeated_share(source.documents(), held_out_source.documents())
        if isinstance(source, DeduplicatedSource):
            manifest["near_duplicates"] = source.report()
        write_manifest(temporary, manifest)


def _split_in_words(split: SplitPlan, held_out_source: str) -> str:
    if held_out_source:
        return f"{held_out_source!r} is held out"
    return "hash of each document" if split.longest is None else "end of the longest document"
