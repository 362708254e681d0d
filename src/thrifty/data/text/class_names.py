"""Names of the classes of labelled texts, from their rows and from a model's config.json."""

from collections.abc import Mapping
from typing import Any

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.text.labelled_rows import LabelledRow, RowsByPart
from thrifty.data.train_split import DataSplit


def _classes(row: LabelledRow) -> tuple[str, ...]:
    return row.label if isinstance(row.label, tuple) else (str(row.label),)


def _model_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the label names in a model's config.json (`id2label`) in order, or an empty tuple."""
    known = config.get("id2label")
    if not isinstance(known, dict) or not all(key.isdecimal() for key in known):
        return ()
    return tuple(str(known[key]) for key in sorted(known, key=int))


def named_by_model(rows: RowsByPart, form: str, config: Mapping[str, Any]) -> RowsByPart:
    """Replace class numbers 0 to n - 1 by the n label names in a model's `config`, if there are any."""
    names = {str(number): name for number, name in enumerate(_model_labels(config)) if name != f"LABEL_{number}"}
    if form == "number" or names.keys() != {name for row in rows[DataSplit.TRAIN] for name in _classes(row)}:
        return rows

    def named(row: LabelledRow) -> LabelledRow:
        label = tuple(names.get(name, name) for name in _classes(row))
        return row._replace(label=label if isinstance(row.label, tuple) else label[0])

    return {part: [named(row) for row in each] for part, each in rows.items()}


def class_names(rows: RowsByPart, settings: DataSettings, form: str, config: Mapping[str, Any]) -> tuple[str, ...]:
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
