"""Labelled rows, tokenized once and cached. The tokenizer adds its special tokens.

prepared/<key>/train.safetensors, held_out.safetensors   tokens of all texts, end of each text, labels
               tokenizer.json, manifest.json             tokenizer; counts, sizes and sha256 of files
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, processors

from thrifty.core.errors import UsageError
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.recipe import DataSettings
from thrifty.core.tokenizer_files import END_OF_TEXT, joins_words
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.prepared_cache import cache_key, open_or_build, write_manifest
from thrifty.data.text.labelled_rows import LabelledRow, RowsByPart
from thrifty.data.text.padded_texts import NO_LABEL, PaddedTexts
from thrifty.data.tokenizer import TextTokenizer, read_tokenizer, train_tokenizer
from thrifty.data.train_split import DataSplit

FORMAT = 1
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Usual names of padding tokens."""
AT_ONCE = 1_000
"""Number of texts that are tokenized in one call."""


def tokenized_rows(
    rows: RowsByPart, names: tuple[str, ...], settings: DataSettings, form: str, say: Callable[[str], None]
) -> Path:
    """Return the folder of tokenized rows. Build the folder first if it is missing."""
    path = Path(settings.tokenizer).expanduser()
    tokenizer = read_tokenizer(path) if settings.tokenizer else None
    digest = hashlib.sha256()
    for part, each in rows.items():
        for row in each:
            digest.update(json.dumps([part, row.texts, row.label]).encode())
    depends = [file_sha256(path)] if tokenizer else ["trained", settings.vocabulary]
    key = cache_key("labelled", FORMAT, form, names, settings.length, digest.hexdigest(), *depends)

    def build(folder: Path) -> None:
        encoder = tokenizer or _trained(rows[DataSplit.TRAIN], settings.vocabulary)
        with build_folder(folder) as temporary:
            encoder.save(temporary)
            cut, longest = 0, 1
            for part, each in rows.items():
                arrays, cut_in_part = _encoded(each, names, form, encoder, settings.length)
                cut, longest = cut + sum(cut_in_part), max(longest, int(np.diff(arrays["ends"], prepend=0).max()))
                save_file(arrays, temporary / f"{part}.safetensors")
            write_manifest(temporary, {"format": FORMAT, "cut": cut, "longest": longest})

    return open_or_build(key, f"the texts of {settings.source or 'the dataset'}", build, say)


def _trained(rows: Sequence[LabelledRow], vocabulary: int) -> TextTokenizer:
    """Train a tokenizer on `rows` that adds an end-of-text token before and after each text."""
    texts = (text if isinstance(text, str) else " ".join(text) for row in rows for text in row.texts)
    tokenizer = train_tokenizer(texts, vocabulary, PADS[:1])
    one, two = f"{END_OF_TEXT} $A {END_OF_TEXT}", f"$B:1 {END_OF_TEXT}:1"
    special = [(END_OF_TEXT, tokenizer.end_of_text)]
    tokenizer.inner.post_processor = processors.TemplateProcessing(one, f"{one} {two}", special)
    return tokenizer


def _encoded(
    rows: Sequence[LabelledRow], names: tuple[str, ...], form: str, tokenizer: TextTokenizer, length: int
) -> tuple[dict[str, np.ndarray], list[bool]]:
    """Return the arrays of `PaddedTexts`, and True for each text that is cut."""
    inner, number = Tokenizer.from_str(tokenizer.inner.to_str()), {name: n for n, name in enumerate(names)}
    inner.encode_special_tokens = True
    try:
        inner.enable_truncation(length)
    except Exception as error:  # tokenizers raises Exception if the special tokens alone exceed the length
        raise UsageError(f"data.length is {length}, too short: {error}", fix="raise data.length") from None
    mark = " " if form == "tags" and joins_words(json.loads(inner.to_str())) else ""
    tokens, types, sizes, labels, cut = [], [], [], [], []
    remaining: Iterator[LabelledRow] = iter(rows)
    while group := list(islice(remaining, AT_ONCE)):
        texts = [tuple(mark + word for word in row.texts[0]) if form == "tags" else _inputs(row) for row in group]
        for row, encoding in zip(group, inner.encode_batch(texts, is_pretokenized=form == "tags"), strict=True):
            ids = encoding.ids or [tokenizer.end_of_text]
            tokens += ids
            types += encoding.type_ids or [0]
            sizes.append(len(ids))
            cut.append(bool(encoding.overflowing))
            if form == "tags":
                labels += _first_pieces(encoding.word_ids, [number[tag] for tag in row.label]) or [NO_LABEL]  # type: ignore[union-attr]
            else:
                labels.append(_target(row.label, number, form))
    kind = np.float32 if form in ("number", "classes") else np.int64
    arrays = {
        "tokens": np.array(tokens, np.int32),
        "types": np.array(types, np.uint8),
        "ends": np.cumsum(sizes, dtype=np.int64),
        "labels": np.array(labels, kind),
    }
    return arrays, cut


def texts_without_labels(
    texts: Sequence[tuple[Any, ...]], ends: TextModelSpec, form: str, tokenizer: TextTokenizer, length: int
) -> tuple[PaddedTexts, list[bool]]:
    """Return new texts, tokenized and padded as for training, and True for each text that is cut.

    `ends` are the outputs of the model. The labels have no meaning, except for word labels: the label of the first
    token of a word is the number of the word in its text.
    """
    names: tuple[str, ...] = ends.labels
    if form == "tags":
        names = tuple(map(str, range(max(len(words) for (words,) in texts))))
        rows = [LabelledRow(each, names[: len(each[0])], "") for each in texts]
    else:
        label: Any = {"number": 0.0, "classes": ()}.get(form, names[0])
        rows = [LabelledRow(each, label, "") for each in texts]
    arrays, cut = _encoded(rows, names, form, tokenizer, length)
    longest = int(np.diff(arrays["ends"], prepend=0).max())
    return PaddedTexts(arrays, longest, ends.padding, ends.labels, form), cut


def _inputs(row: LabelledRow) -> Any:
    return row.texts if len(row.texts) > 1 else row.texts[0]


def _first_pieces(words: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """Return a label per token: the tag of a word for its first token, otherwise NO_LABEL."""
    before = (None, *words[:-1])
    return [NO_LABEL if word is None or word == last else tags[word] for word, last in zip(words, before, strict=True)]


def _target(label: Any, number: Mapping[str, int], form: str) -> Any:
    if form == "number":
        return label
    return number[label] if form == "class" else [float(name in label) for name in number]


def padding_token(tokenizer: TextTokenizer, config: Mapping[str, Any]) -> int:
    """Return the padding token of the model, else of the tokenizer, else the end-of-text token."""
    own = config.get("pad_token_id")
    if isinstance(own, int) and 0 <= own < tokenizer.vocabulary:
        return own
    numbers = (tokenizer.inner.token_to_id(name) for name in PADS)
    return next((number for number in numbers if number is not None), tokenizer.end_of_text)
