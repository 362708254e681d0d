"""Kind of data: texts with labels, from tables, folders of tables and datasets."""

import hashlib
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from torch import Tensor

from thrifty.core.batches import BatchSource
from thrifty.core.errors import RefusedError, UsageError, spelled
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.recipe import DataSettings
from thrifty.data.catalogue import use_model_tokenizer
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.data_loading import dataset_of
from thrifty.data.epoch_sampler import EpochSource, HeldOutExamples
from thrifty.data.lazy_attributes import LazyAttributes
from thrifty.data.prepared_cache import read_manifest, refuse_less_than_a_batch
from thrifty.data.run_data import ExamplePreview
from thrifty.data.run_metadata import TEXT_LABELS, refuse_other_tokenizer, text_label_metadata
from thrifty.data.text.class_names import class_names, named_by_model
from thrifty.data.text.document_sources import TEXT
from thrifty.data.text.labelled_rows import (
    CLEAR_LABELS,
    LABELS,
    LabelledRow,
    RowsByPart,
    dataset_table,
    open_tables,
    read_rows,
    text_column,
)
from thrifty.data.text.labelled_tokens import padding_token, tokenized_rows
from thrifty.data.text.padded_texts import PaddedTexts
from thrifty.data.text.repeated_text import caution_on_repeated
from thrifty.data.tokenizer import TOKENIZER, TextTokenizer, read_tokenizer
from thrifty.data.train_split import DataSplit, label_entropy


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
    cautions: Sequence[str] = ()
    """Cautions that restrict the meaning of the held-out loss."""

    @property
    def example_unit(self) -> int:
        """Mean number of labels per text, rounded to at least 1."""
        return max(1, round(len(self.contents.classes) / len(self.contents)))

    @property
    def facts(self) -> dict[str, Any]:
        known = {} if self.label_entropy is None else {"label_entropy": self.label_entropy}
        cautions = {"cautions": self.cautions} if self.cautions else {}
        return {"unit": "words" if self.contents.has_words else "texts", **known, **cautions}

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
        rows = named_by_model(rows, form, config)
        names = class_names(rows, settings, form, config)
        cautions = _cautions(rows) if DataSplit.HELD_OUT in rows else []
        for caution in cautions:
            request.say(caution)
        if DataSplit.HELD_OUT not in rows:
            rows = _split(rows[DataSplit.TRAIN], settings)
        folder = tokenized_rows(rows, names, settings, form, request.say)
        tokenizer, manifest = read_tokenizer(folder / TOKENIZER), read_manifest(folder)
        arrays = {part: load_file(folder / f"{part}.safetensors") for part in DataSplit}
        padding, longest = padding_token(tokenizer, config), manifest["longest"]
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
            cautions=cautions,
        )


def has_texts(data: Any) -> bool:
    """Return True for a map-style dataset whose first example is a mapping that contains text or a list of words."""
    try:
        parts = dataset_of(data)
        with LazyAttributes(parts.dataset).present():
            first = parts.dataset[0] if parts.is_map_style and len(parts.dataset) else None
    except (UsageError, RefusedError):
        return False
    values = first.values() if isinstance(first, Mapping) else ()
    return any(
        isinstance(each, str) or (isinstance(each, list) and each and isinstance(each[0], str)) for each in values
    )


def _read(objects: Any, settings: DataSettings, form: str, say: Callable[[str], None]) -> RowsByPart:
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


def _cautions(rows: RowsByPart) -> list[str]:
    trained, held_out = {row.texts for row in rows[DataSplit.TRAIN]}, rows[DataSplit.HELD_OUT]
    return caution_on_repeated(sum(row.texts in trained for row in held_out) / len(held_out))


def _split(rows: Sequence[LabelledRow], settings: DataSettings) -> RowsByPart:
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
    parts: RowsByPart = {part: [] for part in DataSplit}
    for row, digest in zip(rows, digests, strict=True):
        parts[DataSplit.HELD_OUT if digest in chosen else DataSplit.TRAIN].append(row)
    return parts
