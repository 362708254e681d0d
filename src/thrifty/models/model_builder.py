"""Construction of a run's initialized model: a model of Thrifty, or a wrapped model of `transformers`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.errors import RefusedError, UsageError, for_reader
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, TextModelSpec, UserModelSpec
from thrifty.core.recipe import ModelSettings, Recipe
from thrifty.models.contrastive_model import ContrastiveModel
from thrifty.models.families import FAMILIES, assemble
from thrifty.models.hf_config import write_config
from thrifty.models.hf_folder import read_config, weight_files
from thrifty.models.masked_autoencoder import MaskedAutoencoder, encoder_alone
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import PRESETS, shape_of
from thrifty.models.model_resolution import check_fit, own_shape, shape_for, stated_sizes
from thrifty.models.transformer import Task, initialize
from thrifty.models.vision_transformer import VisionTransformer, refit
from thrifty.models.weight_conversion import folder_shape, import_folder
from thrifty.models.wrapped_autoencoder import autoencoder_around

_TASK_DESCRIPTIONS = {
    "next_token": "its tokens do not attend to later tokens",
    "masked_token": "its tokens attend to later tokens",
    "sequence_to_sequence": "it maps a source text to a target text",
    "classification": "it classifies images",
    "contrastive": "it compares images with captions",
    "masked_reconstruction": "it reconstructs the pixels of images",
}
LANGUAGE_TASKS = ("next_token", "masked_token", "sequence_to_sequence")
_KIND_FOR = {"chat_answers": "next_token", "mass": "sequence_to_sequence"}
"""Objectives, mapped to the task of the models that they train."""
PROBLEM_TYPES = {
    "classification": "single_label_classification",
    "multi_label_classification": "multi_label_classification",
    "regression": "regression",
    "token_classification": None,
}
"""Objectives on labeled texts, with their problem type in config.json of transformers. Their models are built by
transformers: the body of a language model with a new head."""
_OBJECTIVES = {kind: name for name, kind in PROBLEM_TYPES.items() if kind}


def build_model(
    settings: ModelSettings,
    vocabulary: int,
    length: int,
    seed: int,
    task: Task | Literal["chat_answers", "mass"] = "next_token",
) -> nn.Module:
    """Return the initialized model of a run on text before any technique, see `build_model_for`."""
    return build_model_for(TextModelSpec(vocabulary, length), settings, seed, task)


def build_run_model(recipe: Recipe, ends: ModelSpec) -> nn.Module:
    """Return the initialized model of a run before any technique: the user's own, or see `build_model_for`. An own
    image model that learns masked reconstruction becomes the encoder of a masked autoencoder."""
    torch.manual_seed(recipe.seed)
    task = recipe.objective.name
    if recipe.objects.model is None:
        return build_model_for(ends, recipe.model, recipe.seed, task=task)
    model = recipe.objects.build_model(recipe.model.arguments)
    is_encoder = task == "masked_reconstruction" and isinstance(ends, ImageModelSpec) and recipe.objects.loss is None
    if not is_encoder or getattr(model, "task", None) == task:
        return model
    return autoencoder_around(model, ends.side, ends.channels, recipe.seed)


def build_model_for(
    ends: ModelSpec, settings: ModelSettings, seed: int, task: Task | Literal["chat_answers", "mass"] = "next_token"
) -> nn.Module:
    """Return the initialized model of a run before any technique, the same at every call.

    `ends` describes the model's inputs and outputs: vocabulary and length, or images and labels. The model is built
    from a preset or a folder. A supported family becomes a model of Thrifty. Any other family becomes a wrapped model
    of `transformers` for `task`. A trained image model is adapted to the images and labels of the data. For data with
    labels, the encoder of a trained MAE is used. Raise UsageError for a model that cannot learn the task, and for data
    that do not fit trained weights.
    """
    task = _KIND_FOR.get(task, task)
    shape, is_counted = shape_for(ends, settings), active_fake_mode() is not None  # then values are not used
    if shape is None and isinstance(ends, TextModelSpec) and ends.labels:
        with unset_fake_temporarily():
            return _build_classifier(settings, ends, seed, task, values=not is_counted)
    if shape is not None and not isinstance(ends, UserModelSpec):
        _refuse_another_kind(settings, shape, task)
    if shape is None:
        # the wrappers of transformers measure with real values, even if everything else uses fake tensors
        with unset_fake_temporarily():
            return _build_other(settings, ends, seed, task, values=not is_counted)
    if not settings.folder or settings.reinitialize:
        model = assemble(shape)
        initialize(model, seed)
        return model
    folder = Path(settings.folder)
    model = assemble(folder_shape(folder)) if is_counted else import_folder(folder)[0]
    if isinstance(model, ContrastiveModel):
        model.image.embedding.resize(shape.image)
    if isinstance(model, MaskedAutoencoder):
        model.resize(shape.image)
        if shape.style == "vit":
            model = encoder_alone(model, shape.vocabulary, shape.pool)  # type: ignore[arg-type]
            initialize(model, seed, within="head.")
    if isinstance(model, VisionTransformer) and refit(model, shape.vocabulary, shape.image):
        initialize(model, seed, within="head.")
    return model


def check_model(settings: ModelSettings, task: Task | Literal["chat_answers", "mass"]) -> None:
    """Raise UsageError if the model is missing, cannot learn `task` with any data, or requires a package that is
    missing."""
    from thrifty.models.hf_loader import refuse_without_transformers

    try:
        shape = own_shape(settings)
    except RefusedError:  # an architecture that transformers may know
        refuse_without_transformers("a model outside Thrifty's own families")
        return
    if settings.folder and not settings.reinitialize:
        weight_files(Path(settings.folder))
        if shape.style == "mae" and task == "classification":  # its encoder can
            return
        if shape.style == "clip" and task == "classification":  # its image tower can
            return refuse_without_transformers("a classifier of images from a model of two towers")
    if task not in PROBLEM_TYPES or FAMILIES[shape.style].task not in ("next_token", "masked_token"):
        _refuse_another_kind(settings, shape, _KIND_FOR.get(task, task))
    else:
        refuse_without_transformers("a classifier of texts")


def _build_classifier(settings: ModelSettings, ends: TextModelSpec, seed: int, task: str, values: bool) -> nn.Module:
    """Return a model of transformers with a head for the labels of `ends`, from a folder or with the sizes of a
    preset."""
    from thrifty.models.hf_loader import load_model

    folder = (
        Path(settings.folder) if settings.folder else write_config(shape_of(settings, ends.vocabulary, ends.length))
    )
    fresh, labels = not settings.folder or settings.reinitialize, dict(enumerate(ends.labels))
    if settings.folder:
        _refuse_sizes_of_folder(settings)
    config = {
        "id2label": labels,
        "label2id": {name: number for number, name in labels.items()},
        "problem_type": PROBLEM_TYPES[task],
        "pad_token_id": ends.padding,
    }
    kind: Task = "token_classification" if task == "token_classification" else "text_classification"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_model(folder, kind, fresh, ends.vocabulary, ends.length, values, config)
    if not fresh:
        _check_size(model, settings, ends)
    return model


def _build_other(settings: ModelSettings, ends: ModelSpec, seed: int, task: Task, values: bool) -> nn.Module:
    from thrifty.models.hf_loader import load_model

    _refuse_sizes_of_folder(settings)
    if isinstance(ends, ImageModelSpec) and task == "classification":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            folder, fresh = Path(settings.folder), settings.reinitialize
            return load_model(folder, "image_classification", fresh, values=values, images=ends)
    if not isinstance(ends, TextModelSpec):
        raise UsageError(
            f"the model in {settings.folder!r} cannot learn {task}",
            fix="--loss classification; or --model mae-nano, or --model clip-nano",
        )
    if task not in LANGUAGE_TASKS:
        raise UsageError(
            f"a language model such as the model in {settings.folder!r} cannot learn {task}",
            fix=f"set objective.name to {' or '.join(LANGUAGE_TASKS)}",
        )
    vocabulary, length = ends.vocabulary, ends.length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_model(Path(settings.folder), task, settings.reinitialize, vocabulary, length, values)
    if not settings.reinitialize:
        _check_size(model, settings, ends)
    return model


def _refuse_sizes_of_folder(settings: ModelSettings) -> None:
    if sizes := stated_sizes(settings):
        raise UsageError(
            f"model.{sizes[0]} is set, but config.json in {settings.folder!r} determines the sizes",
            fix=f"leave model.{sizes[0]} out; or edit the folder's config.json",
        )


def _check_size(model: nn.Module, settings: ModelSettings, ends: TextModelSpec) -> None:
    limit = getattr(model.lm.config, "max_position_embeddings", None) or 0
    limit = limit if limit > 0 else ends.length  # XLNet has -1
    tables = (each for name, each in model.lm.named_modules() if isinstance(each, nn.Embedding) and "position" in name)
    before = next((each.padding_idx + 1 for each in tables if each.padding_idx is not None), 0)
    # RoBERTa's positions start after the padding index
    check_fit(settings.folder, model.vocabulary, limit - before, ends.vocabulary, ends.length)


def _refuse_another_kind(settings: ModelSettings, shape: ModelConfig, task: Task) -> None:
    own = FAMILIES[shape.style].task
    if own != task:
        fitting = [name for name, preset in PRESETS.items() if FAMILIES[preset.style].task == task]
        instead = f"; or choose a model that learns {task}: {for_reader(f'--model {fitting[0]}')}" if fitting else ""
        labels = f"; {for_reader('--loss classification')} for labeled texts" if own == "masked_token" else ""
        raise UsageError(
            f"the model {settings.folder or settings.preset!r} cannot learn {task}: {_TASK_DESCRIPTIONS[own]}",
            fix=f"{for_reader(f'--loss {own}')}{labels}{instead}",
        )


def folder_config(settings: ModelSettings) -> Mapping[str, Any]:
    """Return config.json of a trained model's folder; empty if there is no folder."""
    return {} if settings.build or not settings.folder or settings.reinitialize else read_config(Path(settings.folder))


def label_objective(config: Mapping[str, Any]) -> str:
    """Return the objective with labels that a folder of transformers was trained for; "" for any other folder."""
    kind, labels = str(config.get("architectures")), config.get("id2label")
    if "ForImageClassification" in kind:
        return "classification"
    if "ForTokenClassification" in kind:
        return "token_classification"
    if "ForSequenceClassification" not in kind:
        return ""
    is_number = isinstance(labels, dict) and len(labels) == 1
    return _OBJECTIVES.get(config.get("problem_type"), "regression" if is_number else "classification")
