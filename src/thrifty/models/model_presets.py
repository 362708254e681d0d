"""Named model sizes from `presets.toml`, and changes of these sizes by settings."""

import math
import re
import tomllib
from dataclasses import fields, replace
from importlib.resources import files
from typing import Any

from thrifty.core.errors import UsageError, did_you_mean, spelled
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.models.model_config import ModelConfig
from thrifty.models.scaled_rotary import Llama3Scaling


def _preset(row: dict[str, Any]) -> ModelConfig:
    scaling = row.pop("rope_scaling", None)
    follows = {"kv_heads": row["heads"], "vocabulary": 0, "length": 0, "tied": True}
    return ModelConfig(**follows | row, rope_scaling=scaling and Llama3Scaling(**scaling))


_TEXT = (files("thrifty.models") / "presets.toml").read_text(encoding="utf-8")
PRESETS: dict[str, ModelConfig] = {name: _preset(row) for name, row in tomllib.loads(_TEXT).items()}


def resized(shape: ModelConfig, settings: ModelSettings, images: ImageModelSpec | None = None) -> ModelConfig:
    """Return a copy of the `ModelConfig` with the sizes in the settings. By default the inner width scales with the
    width, and the number of key-value heads with the number of heads. A vit, clip or mae is adapted to `images`."""
    sizes = {field.name: getattr(settings, field.name, None) for field in fields(ModelConfig)}
    changes = {name: value for name, value in sizes.items() if value is not None}
    if "width" in changes and "hidden" not in changes:
        changes["hidden"] = 32 * math.ceil(changes["width"] * shape.hidden / shape.width / 32)
    if "heads" in changes and "kv_heads" not in changes:
        changes["kv_heads"] = max(1, changes["heads"] * shape.kv_heads // shape.heads)
    if "decoder_width" in changes:
        changes["decoder_hidden"] = changes["decoder_width"] * shape.decoder_hidden // shape.decoder_width
    if "text_width" in changes:
        changes["text_hidden"] = changes["text_width"] * shape.text_hidden // shape.text_width
    if images is not None and shape.style in ("clip", "mae"):
        changes |= {"image": images.side, "channels": images.channels}
    if images is not None and shape.style == "vit":
        labels = len(images.labels) or shape.vocabulary
        changes |= {"vocabulary": labels, "image": images.side, "channels": images.channels}
    return replace(shape, **changes)


PEER_PRESETS = {"gpt2": "gpt-small", "gpt2-medium": "gpt-medium", "gpt2-large": "gpt-large", "gpt2-xl": "gpt-xl"}
"""Presets of the same shape as models of the Hugging Face hub."""
HUB_MODEL = re.compile(r"(?:hub:)?(?P<owner>[\w-][\w.-]*)/(?P<model>[\w.-]+)")
"""Name of a model of the Hugging Face hub. Thrifty downloads only datasets, so that no model's code or weights arrive
unasked."""


def shape_of(
    settings: ModelSettings,
    vocabulary: int | None = None,
    length: int | None = None,
    images: ImageModelSpec | None = None,
) -> ModelConfig:
    """Return the preset's shape with the changes in the settings. By default vocabulary, length and image size are the
    published values."""
    if settings.preset not in PRESETS:
        raise UsageError(f"model.preset: there is no preset {settings.preset!r}", fix=nearest_model(settings.preset))
    shape = resized(PRESETS[settings.preset], settings, images)
    if shape.style in ("vit", "mae"):
        return shape
    sizes = {"vocabulary": vocabulary, "length": length}
    return replace(shape, **{name: size for name, size in sizes.items() if size is not None})


def nearest_model(name: str) -> str:
    """Return the fix for a name that is neither a preset nor a folder."""
    every = spelled("thrifty list presets", 'thrifty.list("presets")')
    if on_hub := HUB_MODEL.fullmatch(name):
        owner, folder = on_hub["owner"], on_hub["model"]
        command = f"hf download {owner}/{folder} --local-dir {folder}, and --model {folder}"
        call = f'huggingface_hub.snapshot_download("{owner}/{folder}", local_dir="{folder}"), and model="{folder}"'
        return f"{spelled(command, call)}; or {every}"
    return did_you_mean(PEER_PRESETS.get(name, name), PRESETS, f"{every}; or the folder of a Hugging Face model")
