"""Metadata files of a run folder for inference: a tokenizer, labels and image sizes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, PairModelSpec, TextModelSpec, UserModelSpec
from thrifty.core.recipe import Recipe
from thrifty.core.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from thrifty.data.catalogue import use_model_tokenizer
from thrifty.data.tokenizer import TOKENIZER, TextTokenizer, read_tokenizer

Spec = TypeVar("Spec", ImageModelSpec, TextModelSpec)

LABELS = "images.json"
TEXT_LABELS = "labels.json"
KEPT_SETTINGS = (
    "bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "cls_token", "sep_token", "chat_template",
    "padding_side", "truncation_side", "clean_up_tokenization_spaces",
)  # fmt: skip
"""Settings of a pretrained tokenizer that do not depend on its class in transformers."""


def image_metadata(ends: ImageModelSpec) -> dict[str, str]:
    """Return the file that describes the inputs and outputs of an image model, as text by file name."""
    return {LABELS: json.dumps(ends.as_data(), indent=2, ensure_ascii=False) + "\n"}


def text_label_metadata(ends: TextModelSpec) -> dict[str, str]:
    """Return the file that describes the outputs of a model of labelled texts, as text by file name."""
    return {TEXT_LABELS: json.dumps(ends.as_data(), indent=2, ensure_ascii=False) + "\n"}


def tokenizer_settings(recipe: Recipe, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return settings and chat template of the pretrained tokenizer of a run, as text by file name.

    `metadata` has the tokenizer of the run; the result is empty if this is no pretrained tokenizer. The end-of-text
    token is the token that ends documents in training.
    """
    if (own := metadata.get(TOKENIZER)) is None:
        return {}
    path = Path(use_model_tokenizer(recipe.data, recipe.model).tokenizer).expanduser()
    if (tokenizer := unchanged_tokenizer(path, own)) is None:
        return {}
    config, template = path.with_name(TOKENIZER_CONFIG), path.with_name(CHAT_TEMPLATE)
    try:
        files = {CHAT_TEMPLATE: template.read_text(encoding="utf-8")} if template.is_file() else {}
        stated = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        kept = {name: stated[name] for name in KEPT_SETTINGS if stated.get(name) is not None}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"the settings of '{path}' cannot be read: {error}", fix="download its folder again") from None
    if "eos_token" in kept:
        kept["eos_token"] = tokenizer.inner.id_to_token(tokenizer.end_of_text)
    if kept:
        files[TOKENIZER_CONFIG] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **kept}, indent=2) + "\n"
    return files


def unchanged_tokenizer(path: Path, own: str) -> TextTokenizer | None:
    """Return the tokenizer in a file if a run with the tokenizer `own`, as text, has read it; otherwise None."""
    try:
        tokenizer = read_tokenizer(path)
    except UsageError:  # without an end-of-text token, for example
        return None
    return tokenizer if tokenizer.files()[TOKENIZER] == own else None


def read_model_spec(folder: Path, recipe: Recipe) -> ModelSpec:
    """Return the inputs and outputs of the model in a run folder. `recipe` is the recipe of the run.

    Raises IntegrityError for damaged metadata, and UsageError for a folder without metadata.
    """
    images = read_image_spec(folder)
    if images and not (folder / TOKENIZER).is_file():
        return images
    if (labelled := folder / TEXT_LABELS).is_file():
        return _read(labelled, TextModelSpec)
    if recipe.python.data and not (folder / TOKENIZER).exists():
        return UserModelSpec()
    text = TextModelSpec(read_tokenizer(folder / TOKENIZER).vocabulary, recipe.data.length)
    return PairModelSpec(images, text) if images else text


def read_image_spec(folder: Path) -> ImageModelSpec | None:
    """Return the images of the model in a run folder; None for a model without images. Raises IntegrityError for
    damaged metadata."""
    path = folder / LABELS
    return _read(path, ImageModelSpec) if path.is_file() else None


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
