"""Metadata files of a run folder for inference: a tokenizer, labels and image sizes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, PairModelSpec, TextModelSpec, UserModelSpec
from thrifty.core.recipe import Recipe
from thrifty.data.tokenizer import TOKENIZER, read_tokenizer

Spec = TypeVar("Spec", ImageModelSpec, TextModelSpec)

LABELS = "images.json"
TEXT_LABELS = "labels.json"


def image_metadata(ends: ImageModelSpec) -> dict[str, str]:
    """Return the file that describes the inputs and outputs of an image model, as text by file name."""
    return {LABELS: json.dumps(ends.as_data(), indent=2, ensure_ascii=False) + "\n"}


def text_label_metadata(ends: TextModelSpec) -> dict[str, str]:
    """Return the file that describes the outputs of a model of labelled texts, as text by file name."""
    return {TEXT_LABELS: json.dumps(ends.as_data(), indent=2, ensure_ascii=False) + "\n"}


def read_model_spec(folder: Path, recipe: Recipe) -> ModelSpec:
    """Return the inputs and outputs of the model in a run folder. `recipe` is the recipe of the run.

    Raises IntegrityError for damaged metadata, and UsageError for a folder without metadata.
    """
    path = folder / LABELS
    images = path.is_file()
    if images and not (folder / TOKENIZER).is_file():
        return _read(path, ImageModelSpec)
    if (labelled := folder / TEXT_LABELS).is_file():
        return _read(labelled, TextModelSpec)
    if recipe.python.data and not (folder / TOKENIZER).exists():
        return UserModelSpec()
    text = TextModelSpec(read_tokenizer(folder / TOKENIZER).vocabulary, recipe.data.length)
    return PairModelSpec(_read(path, ImageModelSpec), text) if images else text


def refuse_other_tokenizer(before: Mapping[str, str], now: Mapping[str, str], old: Path) -> None:
    """Raise UsageError if the tokenizer of data identity `now` differs from `before`, the identity in folder `old`."""
    if before.get(TOKENIZER) != now[TOKENIZER]:
        raise UsageError(
            "the fork has another tokenizer than the old run, so token ids would change their meaning",
            fix=f"--set data.tokenizer={(old / TOKENIZER).resolve()}",
        )


def _read(path: Path, kind: type[Spec]) -> Spec:
    try:
        return kind.from_data(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{str(path)!r} is damaged: {error}", fix="restore the file; or train again") from None
