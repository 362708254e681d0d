"""`predict`: labels of new texts or images, by the trained model of a run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import RenderableType
from rich.markup import escape
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError, spelled
from thrifty.core.model_spec import ImageModelSpec, TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.recipe import Recipe
from thrifty.core.user_objects import BuildModel
from thrifty.data.images.image_arrays import normalized
from thrifty.data.images.image_decoding import SUFFIXES, ImageDecodeError, decode
from thrifty.data.images.image_listing import images_below
from thrifty.data.run_metadata import read_model_spec
from thrifty.data.text.labelled_rows import read_texts
from thrifty.data.text.labelled_tokens import texts_without_labels
from thrifty.data.text.padded_texts import NO_LABEL
from thrifty.data.text.row_tables import is_table
from thrifty.data.text.row_tables import open_table as read_table
from thrifty.data.text.text_readers import lines as text_lines
from thrifty.data.tokenizer import TOKENIZER, read_tokenizer
from thrifty.interface.loaded_model import own_model
from thrifty.objectives import chosen_objective
from thrifty.reporting.number_format import significant
from thrifty.reporting.printed_result import PrintedResult, lines, open_table
from thrifty.reporting.run_record import run_folder
from thrifty.training.checkpoint_index import CheckpointChoice
from thrifty.training.rank_setup import choose_device
from thrifty.training.trained_model import load_trained_model

BATCH = 64
SHOWN = 60
"""Maximum number of characters of a text in a printed table."""


@dataclass(frozen=True)
class PredictedLabel:
    """Prediction for one example."""

    example: Any
    label: Any
    """Class name; for several labels per text, a list of names; for words, a list with a name per word, or None for a
    word without a token; for regression, a number."""
    probabilities: dict[str, float]
    """Probability of each class. Empty for words and for regression."""
    cut: bool = False
    """True if the text is longer than data.length. The model does not read its end."""


@dataclass(frozen=True, repr=False)
class Predictions(PrintedResult):
    """Predicted labels of examples, in their order."""

    rows: tuple[PredictedLabel, ...]

    @property
    def labels(self) -> list[Any]:
        return [row.label for row in self.rows]

    def as_dict(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __rich__(self) -> RenderableType:
        table = open_table("example", "label", "probability")
        for row in self.rows:
            text = " | ".join(map(str, row.example)) if isinstance(row.example, tuple) else str(row.example)
            label = ", ".join(each or "–" for each in row.label) if isinstance(row.label, list) else row.label
            label = significant(label, 4) if isinstance(label, float) else label
            chosen = row.label if isinstance(row.label, list) else [row.label]
            sure = ", ".join(f"{row.probabilities[name]:.3f}" for name in chosen if name in row.probabilities)
            table.add_row(escape(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"), escape(label), sure)
        cut = sum(row.cut for row in self.rows)
        notice = f"{cut:,} of {len(self.rows):,} texts are longer than data.length and are cut"
        return lines(table, *([notice] if cut else []))


def predict(
    run: Any,
    examples: Sequence[Any] | Path,
    *,
    column: str = "",
    pair_column: str = "",
    checkpoint: CheckpointChoice = "last",
    model: nn.Module | BuildModel | str | None = None,
) -> Predictions:
    """Predict the labels of new examples with a run that was trained on labelled texts or images.

    Args:
        run: Run, run folder or its name under ./runs.
        examples: Texts, pairs of texts (tuples), lists of words for word labels (a text is divided at spaces), or paths
            of image files. A `Path` is a table (.csv, .tsv, .jsonl, .parquet), a text file with one text per line, or a
            folder of images.
        column: Column of texts in a table, and `pair_column` that of second texts; by default as in training.
        checkpoint: "best" (best held-out value), "last" or the step of a checkpoint.
        model: Your own model, if the run trained it.

    Texts are tokenized, cut and padded as in training. Raises UsageError if the run predicts no labels, or for an
    example in another form.

    Example::

        print(thrifty.predict("runs/reviews", ["A wonderful film.", "Two lost hours."]).labels)
    """
    if isinstance(examples, str):
        raise UsageError(
            "examples is one text, not a list of texts",
            fix="thrifty.predict(run, [text]); or pathlib.Path(…) for a file",
        )
    path = run_folder(run)
    trained, recipe = load_trained_model(path, checkpoint, plain=False, objects=own_model(run, model))
    if recipe.python.loss:
        raise UsageError(
            f"'{path}' was trained with your own loss, so its outputs are known to your code only",
            fix="call run.model on a batch; or thrifty.export the run, and load the export",
        )
    objective, ends = chosen_objective(recipe.objective), read_model_spec(path, recipe)
    device = choose_device(recipe.device)
    examples = _read(examples, recipe, objective, column, pair_column) if isinstance(examples, Path) else [*examples]
    if objective.label_form == "tags":
        examples = [each.split() if isinstance(each, str) else each for each in examples]
    if not examples:
        raise UsageError("there are no examples", fix="pass a list of texts, or a file")
    if isinstance(ends, TextModelSpec) and ends.labels and objective.needs_labels:
        fields, cut = _text_fields(path, recipe, objective, ends, examples)
    elif isinstance(ends, ImageModelSpec) and ends.labels and objective.needs_labels:
        fields = {"inputs": normalized(torch.stack([_pixels(each, ends) for each in examples]), ends)}
        fields["labels"], cut = torch.zeros(len(examples), dtype=torch.int64), [False] * len(examples)
    else:
        raise UsageError(
            f"'{path}' has the objective {recipe.objective.name!r}, which predicts no labels",
            fix=f"thrifty sample {path} for a language model; or train with --loss classification",
        )
    logits = _logits(trained.to(device).eval(), objective, fields, device)
    each = zip(examples, cut, logits, fields["labels"], strict=True)
    return Predictions(tuple(_row(objective.label_form, ends.labels, *example) for example in each))


def _read(source: Path, recipe: Recipe, objective: Objective, column: str, pair_column: str) -> list[Any]:
    """Return the examples of a file, or the paths of the visible images in a folder."""
    path = source.expanduser()
    if path.is_dir():
        return list(images_below(path))
    if path.suffix.lower() in SUFFIXES:
        return [path]
    if not path.is_file():
        raise UsageError(f"'{source}' does not exist", fix="pass a table, a text file or a folder of images")
    if not is_table(path):
        return _lines(path)
    own = {"column": column, "pair_column": pair_column}
    settings = replace(recipe.data, **{name: value for name, value in own.items() if value})  # type: ignore[arg-type]
    fix = spelled("--column TEXT_COLUMN", "column='TEXT_COLUMN'")
    rows = read_texts(read_table(path), settings, objective.label_form, fix)
    if objective.label_form == "tags":
        return [list(words) for (words,) in rows]
    return [row if len(row) > 1 else row[0] for row in rows]


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file without blank lines at its end."""
    texts = [text if text.strip() else "" for _, text in text_lines(path)]
    while texts and not texts[-1]:
        texts.pop()
    if "" in texts:
        where = f"{path}, line {texts.index('') + 1}"
        raise UsageError(f"{where} is blank, so it has no label", fix=f"delete the blank lines of {path}")
    return texts


def _text_fields(
    path: Path, recipe: Recipe, objective: Objective, ends: TextModelSpec, examples: Sequence[Any]
) -> tuple[dict[str, Tensor], list[bool]]:
    form = objective.label_form
    for number, example in enumerate(examples):
        parts = [example] if isinstance(example, str) else example
        is_texts = isinstance(parts, list | tuple) and bool(parts) and all(isinstance(part, str) for part in parts)
        if not is_texts or (form == "tags") != isinstance(example, list):
            wanted = "a list of words" if form == "tags" else "a text, or a tuple of two texts"
            raise UsageError(f"example {number} is {example!r:.60}, not {wanted}", fix=f"pass {wanted} per example")
    texts = [(example,) if isinstance(example, str | list) else example for example in examples]
    rows, cut = texts_without_labels(texts, ends, form, read_tokenizer(path / TOKENIZER), recipe.data.length)
    return rows.fields(np.arange(len(examples))), cut


def _pixels(example: Any, ends: ImageModelSpec) -> Tensor:
    if ends.channels != 3:
        raise UsageError(
            f"the run was trained on images with {ends.channels} channels, and files are read as RGB",
            fix="thrifty.export the run, and load the export",
        )
    try:
        return torch.from_numpy(decode(Path(example).expanduser(), ends.side).astype(np.float32) / 255)
    except (ImageDecodeError, TypeError) as error:
        raise UsageError(f"{example!r:.80}: {error}", fix="pass paths of image files") from None


@torch.no_grad()
def _logits(model: nn.Module, objective: Objective, fields: dict[str, Tensor], device: torch.device) -> list[Tensor]:
    found: list[Tensor] = []
    for start in range(0, len(fields["inputs"]), BATCH):
        rows = {name: tensor[start : start + BATCH] for name, tensor in fields.items()}
        if "keep" in rows:  # texts are padded to the longest text of all batches
            longest = int(rows["keep"].sum(1).max())
            rows = {
                name: tensor[:, :longest] if tensor.ndim > 1 and name != "labels" else tensor
                for name, tensor in rows.items()
            }
        batch = Batch(rows, torch.ones(len(rows["inputs"]))).to(device)
        found.extend(objective.predict(model, batch).logits.float().cpu())
    return found


def _row(form: str, names: Sequence[str], example: Any, cut: bool, logits: Tensor, labels: Tensor) -> PredictedLabel:
    if form == "number":
        return PredictedLabel(example, logits.flatten()[0].item(), {}, cut)
    if form == "tags":
        return PredictedLabel(example, _word_labels(names, len(example), logits, labels), {}, cut)
    if form == "classes":
        shares = dict(zip(names, logits.sigmoid().tolist(), strict=True))
        return PredictedLabel(example, [name for name, share in shares.items() if share > 0.5], shares, cut)
    shares = dict(zip(names, logits.softmax(-1).tolist(), strict=True))
    return PredictedLabel(example, max(shares, key=shares.__getitem__), shares, cut)


def _word_labels(names: Sequence[str], words: int, logits: Tensor, numbers: Tensor) -> list[str | None]:
    """Return a label per word, from logits (t, c). `numbers` (n,) are the words' numbers at their first tokens."""
    labels: list[str | None] = [None] * words
    for number, label in zip(numbers[: len(logits)].tolist(), logits.argmax(-1).tolist(), strict=True):
        if number != NO_LABEL:
            labels[number] = names[label]
    return labels
