"""What a run folder keeps of its data, by which a trained model is used: a tokenizer, or labels and sizes of images, or
of images with captions both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, PairModelSpec, TextModelSpec
from thrifty.data.tokenizer import TOKENIZER, read_tokenizer

Spec = TypeVar("Spec", ImageModelSpec, TextModelSpec)

LABELS = "images.json"
TEXT_LABELS = "labels.json"


def image_metadata(ends: ImageModelSpec) -> dict[str, str]:
    """Return the text of the file that describes the inputs and outputs of a model of images."""
    return {LABELS: json.dumps(ends.as_data(), indent=2, ensure_ascii=False) + "\n"}


def text_label_metadata(ends: TextModelSpec) -> dict[str, str]:
    """Return the text of the file that describes the outputs of a model of labelled texts."""
    return {TEXT_LABELS: json.dumps(ends.as_data(), indent=2, ensure_ascii=False) + "\n"}


def read_model_spec(folder: Path, length: int) -> ModelSpec:
    """What a run folder says of its model's inputs and outputs; `length` is that of the run's examples of text.

    Raises IntegrityError where what it says of images is damaged, UsageError where it holds neither.
    """
    path = folder / LABELS
    images = path.is_file()
    if images and not (folder / TOKENIZER).is_file():
        return _read(path, ImageModelSpec)
    if (labelled := folder / TEXT_LABELS).is_file():
        return _read(labelled, TextModelSpec)
    text = TextModelSpec(read_tokenizer(folder / TOKENIZER).vocabulary, length)
    return PairModelSpec(_read(path, ImageModelSpec), text) if images else text


def refuse_other_tokenizer(before: Mapping[str, str], now: Mapping[str, str], old: Path) -> None:
    """Raises UsageError where data with the identity `now` have another tokenizer than those of the run folder `old`,
    which had the identity `before`."""
    if before.get(TOKENIZER) != now[TOKENIZER]:
        raise UsageError(
            "the fork's tokenizer is not the old run's: its token numbers would mean something else",
            fix=f"--set data.tokenizer={(old / TOKENIZER).resolve()}",
        )


def _read(path: Path, kind: type[Spec]) -> Spec:
    try:
        return kind.from_data(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is damaged: {error}", fix="bring the file back, or train again") from None
