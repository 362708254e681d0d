"""Labelled texts: tokenized once, cached, and padded to equal length. The tokenizer adds its special tokens.

prepared/<key>/train.safetensors, held_out.safetensors   tokens of all texts, end of each text, labels
               tokenizer.json, manifest.json             tokenizer; counts, sizes and sha256 of files
"""

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors
from torch import Tensor

from thrifty.core.batches import BatchSource, ExampleIndex
from thrifty.core.errors import RefusedError, UsageError, spelled
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.recipe import DataSettings
from thrifty.data.catalogue import use_model_tokenizer
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.data_loading import dataset_of
from thrifty.data.epoch_sampler import EpochSource, HeldOutExamples, fingerprint
from thrifty.data.prepared_cache import (
    cache_key,
    open_or_build,
    read_manifest,
    refuse_less_than_a_batch,
    write_manifest,
)
from thrifty.data.run_data import ExamplePreview
from thrifty.data.run_metadata import TEXT_LABELS, refuse_other_tokenizer, text_label_metadata
from thrifty.data.text.document_sources import TEXT
from thrifty.data.text.labelled_rows import (
    CLEAR_LABELS,
    LABELS,
    LabelledRow,
    dataset_table,
    open_tables,
    read_rows,
    text_column,
)
from thrifty.data.tokenizer import END_OF_TEXT, TOKENIZER, TextTokenizer, read_tokenizer, train_tokenizer
from thrifty.data.train_split import DataSplit, label_entropy

FORMAT = 1
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Usual names of padding tokens."""
NO_LABEL = -100
"""Label of tokens without a label, as in transformers."""
AT_ONCE = 1_000
"""Number of texts that are tokenized in one call."""

Rows = dict[DataSplit, list[LabelledRow]]


class PaddedTexts:
    """Texts padded to the length t of the longest text, see `objectives.labelled_text`.

    b texts have {"inputs": (b, t), "keep": bool (b, t), "labels": (b, …)}; pairs also have {"types": (b, t)}.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], length: int, padding: int, names: tuple[str, ...], form: str):
        self.tokens, self.types, self.ends, self.labels = (
            arrays[name] for name in ("tokens", "types", "ends", "labels")
        )
        self.length, self.padding, self.names, self.form = length, padding, names, form
        self.begins = np.concatenate(([0], self.ends))[:-1]
        self.has_words, self.has_types = form == "tags", bool(self.types.any())

    def __len__(self) -> int:
        return len(self.ends)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        offsets = np.arange(self.length)
        keep = offsets < (self.ends - self.begins)[indices, None]
        places = np.where(keep, self.begins[indices, None] + offsets, 0)
        rows = {"inputs": np.where(keep, self.tokens[places].astype(np.int64), self.padding), "keep": keep}
        if self.has_types:
            rows["types"] = np.where(keep, self.types[places], 0).astype(np.int64)
        rows["labels"] = np.where(keep, self.labels[places], NO_LABEL) if self.has_words else self.labels[indices]
        return {name: torch.from_numpy(values) for name, values in rows.items()}

    @property
    def classes(self) -> np.ndarray:
        """Labels of all texts; for word labels, of all words."""
        return self.labels[self.labels != NO_LABEL] if self.has_words else self.labels

    def texts(self, indices: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
        return [decode(self.tokens[self.begins[i] : self.ends[i]].tolist()) for i in indices]

    def label_of(self, index: int) -> str:
        """Return the label of a text for display."""
        if self.has_words:
            tags = self.labels[self.begins[index] : self.ends[index]]
            return " ".join(self.names[tag] for tag in tags if tag != NO_LABEL)
        label = self.labels[index]
        if np.ndim(label):
            return ", ".join(name for name, has in zip(self.names, label, strict=True) if has)
        return f"{label:g}" if label.dtype.kind == "f" else self.names[label]

    def example_index(self) -> ExampleIndex:
        if self.form != "class":
            return ExampleIndex(len(self), self._fingerprint)
        return ExampleIndex(len(self), self._fingerprint, torch.from_numpy(self.labels), self.names)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokens, self.ends, self.labels, also=(self.length, self.names))


@dataclass(frozen=True)
class LabelledData:
    """Opened labelled texts, see `run_data.RunData`."""

    train: BatchSource
    held_out: HeldOutExamples
    tokenizer: TextTokenizer
    ends: TextModelSpec
    identity: Mapping[str, str]
    contents: PaddedTexts
    """Training examples."""
    label_entropy: float | None = None
    """Cross-entropy of held-out labels under the training frequencies, in nats; None unless labels are classes."""

    @property
    def example_unit(self) -> int:
        """Mean number of labels per text, rounded to at least 1."""
        return max(1, round(len(self.contents.classes) / len(self.contents)))

    @property
    def facts(self) -> dict[str, Any]:
        known = {} if self.label_entropy is None else {"label_entropy": self.label_entropy}
        return {"unit": "words" if self.contents.has_words else "texts", **known}

    def description(self) -> dict[str, Any]:
        sizes = {"training_texts": len(self.contents), "held_out_texts": len(self.held_out)}
        return {**sizes, "tokens_in_a_row": self.contents.length, "labels": len(self.ends.labels)}

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        texts = self.contents.texts(np.array(numbers, np.int64), self.tokenizer.decode)
        labels = map(self.contents.label_of, numbers)
        return [
            ExamplePreview(n, text=text, label=label) for n, text, label in zip(numbers, texts, labels, strict=True)
        ]

    def pictures(self, inputs: Tensor) -> list[str]:
        raise RefusedError("labelled texts have no images", fix="set data.source to an image folder")

    def metadata(self) -> dict[str, str]:
        return self.tokenizer.files() | text_label_metadata(self.ends)

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        refuse_other_tokenizer(before, self.identity, old)
        if before.get(TEXT_LABELS) != self.identity[TEXT_LABELS]:
            raise UsageError(
                f"the fork has other labels than {str(old)!r}, so outputs would change their meaning",
                fix="use data with the same labels; or start a new run",
            )


class LabelledTexts(DataKind):
    """Texts, pairs of texts or lists of words, with labels."""

    name, own_settings = "labelled_text", ("pair_column", "label_column", "held_out_source")
    about, recipe, loss, overrules = "texts with labels", "masked", "classification", True

    def holds(self, settings: DataSettings) -> bool:
        return bool(text_column(settings, LABELS))

    def is_main(self, settings: DataSettings) -> bool:
        texts = text_column(settings, LABELS)
        return not settings.column and bool(text_column(settings, CLEAR_LABELS) if texts == TEXT else texts)

    def alternative(self, settings: DataSettings, kinds: Sequence[DataKind]) -> str:
        if all(kind.name != "text" for kind in kinds):
            return ""
        column = text_column(settings, LABELS)
        choice = spelled(f"--set data.column={shlex.quote(column)}", f'settings={{"data.column": "{column}"}}')
        return f"; or {choice}, to train on the texts alone"

    def open(self, request: DataRequest) -> tuple[Objective, LabelledData]:
        recipe, objective = request.recipe, request.objective
        settings = use_model_tokenizer(recipe.data, recipe.model)
        config, form = request.model_config(), objective.label_form
        rows = _read(recipe.objects, settings, form, request.say)
        rows = _with_names_of_numbers(rows, form, config)
        names = _names(rows, settings, form, config)
        if DataSplit.HELD_OUT not in rows:
            rows = _split(rows[DataSplit.TRAIN], settings)
        folder = _prepared(rows, names, settings, form, request.say)
        tokenizer, manifest = read_tokenizer(folder / TOKENIZER), read_manifest(folder)
        arrays = {part: load_file(folder / f"{part}.safetensors") for part in DataSplit}
        padding, longest = _padding(tokenizer, config), manifest["longest"]
        contents = {part: PaddedTexts(each, longest, padding, names, form) for part, each in arrays.items()}
        train, held_out = (contents[part] for part in DataSplit)
        refuse_less_than_a_batch(settings, len(train), f"has {len(train)} texts")
        if cut := manifest["cut"]:
            request.say(f"{cut:,} texts are longer than data.length = {settings.length} and are cut")
        is_class = form in ("class", "tags")
        files = {name: file["sha256"] for name, file in manifest["files"].items()}
        return objective.with_labels(names), LabelledData(
            train=EpochSource(train, settings.batch, recipe.seed),
            held_out=HeldOutExamples(held_out),
            tokenizer=tokenizer,
            ends=TextModelSpec(tokenizer.vocabulary, settings.length, names, padding),
            identity={**files, TEXT_LABELS: "/".join(names)},
            contents=train,
            label_entropy=label_entropy(train.classes, held_out.classes, len(names)) if is_class else None,
        )


def has_texts(data: Any) -> bool:
    """Return True for a map-style dataset whose first example is a mapping that contains text or a list of words."""
    try:
        parts = dataset_of(data)
        first = parts.dataset[0] if parts.is_map_style and len(parts.dataset) else None
    except (UsageError, RefusedError):
        return False
    values = first.values() if isinstance(first, Mapping) else ()
    return any(
        isinstance(each, str) or (isinstance(each, list) and each and isinstance(each[0], str)) for each in values
    )


def _read(objects: Any, settings: DataSettings, form: str, say: Callable[[str], None]) -> Rows:
    """Return the training rows, and held-out rows if the source has them. Raises UsageError for a part without rows."""
    left_out: list[str] = []
    if objects.data is None:
        tables = open_tables(settings.source)
        if settings.held_out_source:
            tables[DataSplit.HELD_OUT] = open_tables(settings.held_out_source)[DataSplit.TRAIN]
    else:
        objects_by_part = {DataSplit.TRAIN: objects.data, DataSplit.HELD_OUT: objects.held_out}
        datasets = {part: dataset_of(each).dataset for part, each in objects_by_part.items()}
        tables = {part: [dataset_table(each, f"the {part} dataset")] for part, each in datasets.items()}
    rows = {part: read_rows(each, settings, form, left_out) for part, each in tables.items()}
    if left_out:
        say(f"{len(left_out):,} rows without a text or a label are left out: {', '.join(left_out[:3])}")
    for part, each in rows.items():
        if not each:
            raise UsageError(f"{settings.source or 'data'} has no {part} texts with labels", fix="add rows with labels")
    return rows


def _split(rows: Sequence[LabelledRow], settings: DataSettings) -> Rows:
    """Split rows by the hash of their text. Rows with the same text belong to the same part.

    The order of rows has no effect. Raises UsageError if no training rows remain.
    """
    digests = [hashlib.blake2b(repr(row.texts[0]).encode(), digest_size=8).digest() for row in rows]
    ordered = sorted(set(digests))
    chosen = set(ordered[: math.ceil(settings.held_out * len(ordered))])
    if len(chosen) == len(ordered):
        raise UsageError(
            f"{settings.source!r} has too few texts to hold {100 * settings.held_out:g}% of them out",
            fix="add texts; or --set data.held_out_source=FILE",
        )
    parts: Rows = {part: [] for part in DataSplit}
    for row, digest in zip(rows, digests, strict=True):
        parts[DataSplit.HELD_OUT if digest in chosen else DataSplit.TRAIN].append(row)
    return parts


def _classes(row: LabelledRow) -> tuple[str, ...]:
    return row.label if isinstance(row.label, tuple) else (str(row.label),)


def _model_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the label names in a model's config.json (`id2label`) in order, or an empty tuple."""
    known = config.get("id2label")
    if not isinstance(known, dict) or not all(key.isdecimal() for key in known):
        return ()
    return tuple(str(known[key]) for key in sorted(known, key=int))


def _with_names_of_numbers(rows: Rows, form: str, config: Mapping[str, Any]) -> Rows:
    """Replace class numbers 0 to n - 1 by the n label names in a model's `config`, if there are any."""
    names = {str(number): name for number, name in enumerate(_model_labels(config)) if name != f"LABEL_{number}"}
    if form == "number" or names.keys() != {name for row in rows[DataSplit.TRAIN] for name in _classes(row)}:
        return rows

    def named(row: LabelledRow) -> LabelledRow:
        label = tuple(names.get(name, name) for name in _classes(row))
        return row._replace(label=label if isinstance(row.label, tuple) else label[0])

    return {part: [named(row) for row in each] for part, each in rows.items()}


def _names(rows: Rows, settings: DataSettings, form: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes; for regression, the name of the label column.

    If the model has all classes, its order is used; otherwise classes are sorted by number or by alphabet. Raises
    UsageError for a held-out label without training texts, and for a single class.
    """
    if form == "number":
        return (settings.label_column or "score",)
    trained = {name for row in rows[DataSplit.TRAIN] for name in _classes(row)}
    own = _model_labels(config)
    if trained <= set(own) and len(own) == len(set(own)):
        names = own
    else:
        are_numbers = all(name.removeprefix("-").isdecimal() for name in trained)
        names = tuple(sorted(trained, key=lambda name: (int(name), name)) if are_numbers else sorted(trained))
    for row in rows.get(DataSplit.HELD_OUT, ()):
        if unknown := set(_classes(row)) - set(names):
            raise UsageError(
                f"{row.where}: no training text has the label {min(unknown)!r}; there are: {', '.join(names[:20])}",
                fix="correct the label; or add training texts with it",
            )
    if len(names) < (1 if form == "classes" else 2):
        what = f"every text has the label {names[0]!r}" if names else "no text has a label"
        raise UsageError(what, fix="add texts with more labels")
    return names


def _padding(tokenizer: TextTokenizer, config: Mapping[str, Any]) -> int:
    """Return the padding token of the model, else of the tokenizer, else the end-of-text token."""
    own = config.get("pad_token_id")
    if isinstance(own, int) and 0 <= own < tokenizer.vocabulary:
        return own
    numbers = (tokenizer.inner.token_to_id(name) for name in PADS)
    return next((number for number in numbers if number is not None), tokenizer.end_of_text)


def _prepared(
    rows: Rows, names: tuple[str, ...], settings: DataSettings, form: str, say: Callable[[str], None]
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
                cut, longest = cut + cut_in_part, max(longest, int(np.diff(arrays["ends"], prepend=0).max()))
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
) -> tuple[dict[str, np.ndarray], int]:
    """Return the arrays of `PaddedTexts`, and the number of texts that are cut."""
    inner, number = Tokenizer.from_str(tokenizer.inner.to_str()), {name: n for n, name in enumerate(names)}
    inner.encode_special_tokens = True
    try:
        inner.enable_truncation(length)
    except Exception as error:  # tokenizers raises Exception if the special tokens alone exceed the length
        raise UsageError(f"data.length is {length}, too short: {error}", fix="raise data.length") from None
    mark = " " if form == "tags" and '"ByteLevel"' in json.dumps(json.loads(inner.to_str())["pre_tokenizer"]) else ""
    tokens, types, sizes, labels, cut = [], [], [], [], 0
    remaining: Iterator[LabelledRow] = iter(rows)
    while group := list(islice(remaining, AT_ONCE)):
        texts = [tuple(mark + word for word in row.texts[0]) if form == "tags" else _inputs(row) for row in group]
        for row, encoding in zip(group, inner.encode_batch(texts, is_pretokenized=form == "tags"), strict=True):
            ids = encoding.ids or [tokenizer.end_of_text]
            tokens += ids
            types += encoding.type_ids or [0]
            sizes.append(len(ids))
            cut += bool(encoding.overflowing)
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
