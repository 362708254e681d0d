"""Rows of texts and labels from tables, folders of tables, and map-style datasets.

Files in a folder are named by part, such as train.csv and test.csv.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.text.document_sources import HUB, HubSource, refuse_compressed
from thrifty.data.text.row_tables import Table, first_row, is_saved_dataset, is_table, open_table, saved_splits
from thrifty.data.text.text_readers import check_characters
from thrifty.data.train_split import DataSplit

TEXTS = (
    ("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("text",), ("sentence",), ("review",), ("content",),
)  # fmt: skip
"""Usual columns of texts and of pairs of texts, in order of preference."""
WORDS = (("tokens",), ("words",), ("text",))
LABELS = ("label", "labels", "class", "target", "score", "stars")
CLEAR_LABELS = ("label", "labels")
"""Columns that mark a table of labelled texts even for objectives that read only its texts."""
TAGS = ("tags", "ner_tags", "pos_tags", "labels", "label")
NAME_COLUMN, NAME_LABEL = "--set data.column=TEXT_COLUMN", "--set data.label_column=LABEL_COLUMN"
"""Fixes for missing columns."""
PARTS = {DataSplit.TRAIN: ("train",), DataSplit.HELD_OUT: ("held_out", "validation", "valid", "dev", "eval", "test")}
"""Prefixes of the names of files and splits, by part."""
INDICATORS = {"0", "1", "true", "false"}
"""Values in a one-hot row. The row has a 1 or a 0 for each class."""
DECIMAL = re.compile(r"-?\d+\.\d+")
"""A decimal number in a text table."""
FORMS = "a .csv, .tsv, .jsonl or .parquet file with a column of texts and a column of labels"
Label = str | float | tuple[str, ...]


class LabelledRow(NamedTuple):
    texts: tuple[str, ...] | tuple[tuple[str, ...], ...]
    """One or two texts, or one list of words."""
    label: Label
    where: str
    """Position of the row, for messages."""


RowsByPart = dict[DataSplit, list[LabelledRow]]


def open_tables(source: str) -> dict[DataSplit, list[Table]]:
    """Return the tables of a source by part. A source without a held-out part has only a training part.

    Raises UsageError if there is no table.
    """
    path = Path(source).expanduser()
    if source.startswith(HUB):
        splits = HubSource(source.removeprefix(HUB), "").splits()
        return {part: [dataset_table(chosen[0], source)] for part, chosen in _parts(splits, source).items()}
    if path.is_dir() and is_saved_dataset(path):
        parts = _parts(saved_splits(path), source)
        return {part: [open_table(file) for file in chosen[0]] for part, chosen in parts.items()}
    if path.is_dir():
        files = {file.name: file for file in sorted(path.iterdir()) if is_table(file)}
        return {part: [open_table(file) for file in chosen] for part, chosen in _parts(files, source).items()}
    refuse_compressed(path)
    if path.is_file() and is_table(path):
        return {DataSplit.TRAIN: [open_table(path)]}
    what = "is not a table of texts with labels" if path.exists() else "is neither a file, a folder nor hub:owner/name"
    raise UsageError(f"{source!r} {what}", fix=f"set data.source to {FORMS}, or a folder with train.csv and test.csv")


def text_column(settings: DataSettings, labels: Sequence[str]) -> str:
    """Return the column of texts of a source that also has one of the columns `labels`; "" for other sources."""
    path = Path(settings.source).expanduser()
    row = first_row(path)
    if not row and path.is_dir() and not is_saved_dataset(path):
        row = next((row for file in sorted(path.glob("train*")) if (row := first_row(file))), {})
    columns = next((names for names in (*TEXTS, *WORDS) if all(name in row for name in names)), ("",))
    label = settings.label_column or next((name for name in labels if name in row), "")
    chosen = settings.column or columns[0]
    return chosen if chosen in row and label in row else ""


def dataset_table(data: Any, name: str) -> Table:
    """Return the rows of a map-style dataset of mappings, such as `datasets.Dataset` or a list."""
    rows = ((f"{name}, row {number}", data[number]) for number in range(len(data)))
    features = getattr(data, "features", None) or {}
    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return Table(name, rows, {column: each.names for column, each in inner.items() if hasattr(each, "names")})


def read_rows(tables: Sequence[Table], settings: DataSettings, form: str, left_out: list[str]) -> list[LabelledRow]:
    """Return the labelled texts of tables. Add the positions of rows without a text or label to `left_out`.

    `form` is an objective's `label_form`. Raises UsageError for missing columns and for a label in another form.
    """
    rows: list[LabelledRow] = []
    for table in tables:
        columns: tuple[tuple[str, ...], str] | None = None
        for where, row in table.rows:
            if columns is None:
                columns = _columns(row, settings, form, table.name)
            texts, label = columns
            if missing := next((name for name in (*texts, label) if name not in row), None):
                columns_of_row = ", ".join(map(str, row))
                raise UsageError(
                    f"{where}: no column {missing!r}; there are: {columns_of_row}", fix="add the column to the row"
                )
            words = [_words(row[name], f"{where}: column {name!r}", form == "tags") for name in texts]
            value = _label(_plain(row[label]), form, table.classes.get(label, ()), f"{where}: column {label!r}")
            if value is None or not words[0]:
                left_out.append(where)
                continue
            if form == "tags" and isinstance(value, tuple) and len(value) != len(words[0]):
                raise UsageError(
                    f"{where}: {len(words[0])} words, but {len(value)} labels", fix="write one label for each word"
                )
            rows.append(LabelledRow(tuple(words), value, where))  # type: ignore[arg-type]
    return rows


def read_texts(table: Table, settings: DataSettings, form: str, fix: str = NAME_COLUMN) -> list[tuple[Any, ...]]:
    """Return the texts of a table without labels: one text, a pair, or a list of words per row. The columns are named
    as in training. Raises UsageError for a missing column, with the given fix, or for a missing text."""
    rows: list[tuple[Any, ...]] = []
    columns: tuple[str, ...] = ()
    for where, row in table.rows:
        columns = columns or _text_columns(row, settings, form, table.name, fix)
        texts = [_words(row.get(name), f"{where}: column {name!r}", form == "tags") for name in columns]
        if not all(texts):
            raise UsageError(f"{where} has no text", fix="remove the row")
        rows.append(tuple(texts))
    return rows


def _columns(row: Mapping[str, Any], settings: DataSettings, form: str, name: str) -> tuple[tuple[str, ...], str]:
    """Return the text columns and the label column. Raises UsageError that lists all columns if one is missing."""
    label = settings.label_column or next((each for each in (TAGS if form == "tags" else LABELS) if each in row), "")
    fix = NAME_COLUMN + ("" if label in row else f" {NAME_LABEL}")
    texts = _text_columns(row, settings, form, name, fix)
    if label not in row:
        what = f"no column {label!r}" if label else "no column of labels"
        present = ", ".join(map(str, row))
        raise UsageError(f"{name}: {what}; there are: {present}", fix=NAME_LABEL)
    return texts, label


def _text_columns(row: Mapping[str, Any], settings: DataSettings, form: str, name: str, fix: str) -> tuple[str, ...]:
    present = ", ".join(map(str, row))
    usual = WORDS if form == "tags" else TEXTS
    chosen = "" if settings.column == "text" else settings.column  # the default of recipes of earlier versions
    own = chosen or ("text" if "text" in row else "")
    pair = (settings.pair_column,) if settings.pair_column else ()
    if own and (chosen or pair):
        texts: tuple[str, ...] | None = (own, *pair)
    else:
        likely = [names if names[1:] else (*names, *pair) for names in usual if not pair or names[1:] in ((), pair)]
        texts = next((names for names in likely if all(each in row for each in names)), None)
    missing = next((each for each in texts or pair if each not in row), None)
    if texts is None or missing:
        what = f"no column {missing!r}" if missing else "no column of texts"
        raise UsageError(f"{name}: {what}; there are: {present}", fix=fix)
    return texts


def _plain(value: Any) -> Any:
    """Convert a label of numpy or torch to a Python value."""
    return value.tolist() if hasattr(value, "tolist") else value


def _words(value: Any, where: str, split: bool) -> Any:
    """Return a text; with `split`, its words."""
    value = _plain(value)
    if split and isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        for word in value:
            check_characters(word, where)
        return tuple(value)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where} holds {type(value).__name__}, not text", fix="--set data.column=TEXT_COLUMN")
    check_characters(value or "", where)
    return tuple((value or "").split()) if split else (value or "").strip() and value


def _label(value: Any, form: str, names: Sequence[str], where: str) -> Label | None:
    """Return a label in the form of the objective, or None for a missing label."""
    if form == "number":
        return _number(value, where)
    if form == "class":
        value = float(value) if isinstance(value, str) and DECIMAL.fullmatch(value) else value
        return _class(value, names, where)
    if isinstance(value, str):
        value = value.split() if form == "tags" else [each.strip() for each in value.split(",") if each.strip()]
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where} holds {value!r:.60}, not a list", fix="write a list of labels")
    each = [_class(one, names, where) for one in value]
    if None in each:
        raise UsageError(
            f"{where} holds {value!r:.60}, with an element that is not a label", fix="replace the element by a label"
        )
    if form == "classes" and len({*each}) < len(each) and {*each} <= INDICATORS:
        raise UsageError(
            f"{where} holds {value!r:.60}, a one-hot row without class names",
            fix="write the names or numbers of the classes of the text",
        )
    return tuple(one for one in each if one is not None)


def _class(value: Any, names: Sequence[str], where: str) -> str | None:
    """Return the name of a class: a text, an integer as text (1.0 becomes 1), or the name of a class number."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        check_characters(value, where)
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        if names and not 0 <= number < len(names):
            return None  # test sets without labels have -1
        return names[number] if names else str(number)
    if isinstance(value, float):
        raise UsageError(f"{where} holds {value!r}, a number, not a class", fix="--loss regression")
    raise UsageError(
        f"{where} holds {value!r:.60}, a {type(value).__name__}, not a single label",
        fix="--set objective.name=multi_label_classification; or --set objective.name=token_classification",
    )


def _number(value: Any, where: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{where} holds {value!r:.60}, not a number",
            fix="--set objective.name=classification; or --set data.label_column=NAME",
        ) from None
    if math.isnan(number):
        return None
    if not abs(number) <= np.finfo(np.float32).max:
        raise UsageError(f"{where} holds {number}, not a finite number of float32", fix="remove the row")
    return number


def _parts(named: Mapping[str, Any], source: str) -> dict[DataSplit, list[Any]]:
    """Group files or splits by part: each name begins with a prefix in PARTS.

    If several held-out prefixes occur, the first prefix in PARTS is used. Raises UsageError without a training part.
    """
    by_word = {
        word: [each for name, each in named.items() if name.lower().startswith(word)]
        for words in PARTS.values()
        for word in words
    }
    first = {part: next((by_word[word] for word in words if by_word[word]), []) for part, words in PARTS.items()}
    if not first[DataSplit.TRAIN]:
        raise UsageError(
            f"{source!r} has no file or split such as train.csv; there are: {', '.join(named) or 'none'}",
            fix="rename the training file or split to train",
        )
    return {part: each for part, each in first.items() if each}
