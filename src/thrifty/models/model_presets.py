"""Sizes of models, from 1M to 8B parameters, and how a model is put together from its sizes.

The small presets are ours: inner width 4 times the width, for llama 8/3 times rounded up to a multiple of 64. The large
ones have the published shape of the model they are named after. The presets of gpt1 are those of gpt with the norms
behind the sums, where the first GPT had them.
"""

import math
from dataclasses import fields, replace

from thrifty.core.errors import refuse_unknown
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.models.families import assemble
from thrifty.models.families.model_family import Model
from thrifty.models.model_config import ModelConfig, Style
from thrifty.models.scaled_rotary import Llama3Scaling


def _shape(
    style: Style, depth: int, width: int, heads: int, vocabulary: int, length: int, eps: float = 1e-5
) -> ModelConfig:
    """With an inner width of 4 times the width, and a tied head."""
    return ModelConfig(style, depth, width, heads, heads, 4 * width, vocabulary, length, tied=True, norm_eps=eps)


def _gpt(depth: int, width: int, heads: int, vocabulary: int = 50_257, length: int = 1024) -> ModelConfig:
    return _shape("gpt", depth, width, heads, vocabulary, length)


def _vit(depth: int, width: int, heads: int, image: int = 224, patch: int = 16, labels: int = 1000) -> ModelConfig:
    return ModelConfig(
        "vit", depth, width, heads, heads, 4 * width, labels, 0, tied=False, norm_eps=1e-6, image=image, patch=patch
    )


def _mae(encoder: ModelConfig, depth: int, width: int, heads: int) -> ModelConfig:
    """A vit's sizes, and a decoder of such a depth, width and heads."""
    sizes = {"decoder_depth": depth, "decoder_width": width, "decoder_heads": heads, "decoder_hidden": 4 * width}
    return replace(encoder, style="mae", **sizes)


def _clip(patch: int) -> ModelConfig:
    """As published: images of 224 pixels, captions of up to 77 tokens."""
    return ModelConfig("clip", 12, 768, 12, 12, 3072, 49_408, 77, tied=False, patch=patch)


def _small_clip(depth: int, width: int, heads: int, image: int, patch: int) -> ModelConfig:
    text = {"text_depth": 4, "text_width": 128, "text_heads": 4, "text_hidden": 512, "space": 128}
    sizes = depth, width, heads, heads, 4 * width
    return ModelConfig("clip", *sizes, 4096, 32, tied=False, image=image, patch=patch, **text)


_SMALL = {"vocabulary": 4096, "length": 256}
_LLAMA_32 = Llama3Scaling(factor=32.0, low=1.0, high=4.0, original=8192)

PRESETS: dict[str, ModelConfig] = {
    "gpt-nano": _gpt(4, 128, 4, **_SMALL),
    "gpt-micro": _gpt(4, 256, 4, **_SMALL),
    "gpt-mini": _gpt(8, 384, 6, **_SMALL),
    "gpt-small": _gpt(12, 768, 12),  # GPT-2
    "gpt-medium": _gpt(24, 1024, 16),
    "gpt-large": _gpt(36, 1280, 20),
    "gpt-xl": _gpt(48, 1600, 25),
    "gpt1-nano": _shape("gpt1", 4, 128, 4, **_SMALL),
    "gpt1-micro": _shape("gpt1", 4, 256, 4, **_SMALL),
    "gpt1-small": _shape("gpt1", 12, 768, 12, 40_478, 512),  # GPT
    "llama-nano": ModelConfig("llama", 4, 128, 4, 2, 384, tied=True, **_SMALL),
    "llama-micro": ModelConfig("llama", 4, 256, 4, 2, 704, tied=True, **_SMALL),
    "llama-mini": ModelConfig("llama", 8, 384, 6, 6, 1024, tied=True, **_SMALL),
    "llama-small": ModelConfig("llama", 12, 768, 12, 12, 2048, vocabulary=50_257, length=1024, tied=True),
    "smollm2-135m": ModelConfig("llama", 30, 576, 9, 3, 1536, 49_152, 8192, tied=True, rope_base=100_000.0),
    "llama-1b": ModelConfig(
        "llama", 16, 2048, 32, 8, 8192, 128_256, 131_072, tied=True, rope_base=500_000.0, rope_scaling=_LLAMA_32
    ),  # Llama 3.2 1B
    "llama-8b": ModelConfig(
        "llama", 32, 4096, 32, 8, 14_336, 128_256, 8192, tied=False, rope_base=500_000.0
    ),  # Llama 3 8B
    "bert-nano": _shape("bert", 4, 128, 4, **_SMALL, eps=1e-12),
    "bert-micro": _shape("bert", 4, 256, 4, **_SMALL, eps=1e-12),
    "bert-small": _shape("bert", 12, 768, 12, 30_522, 512, eps=1e-12),  # BERT base
    "t5-nano": _shape("t5", 2, 128, 4, **_SMALL, eps=1e-6),
    "t5-micro": _shape("t5", 2, 256, 4, **_SMALL, eps=1e-6),
    "t5-small": _shape("t5", 6, 512, 8, 32_128, 512, eps=1e-6),
    "t5-v1.1-small": ModelConfig(
        "t5",
        8,
        512,
        6,
        6,
        1024,
        32_128,
        512,
        tied=False,
        norm_eps=1e-6,
        fixed_head_width=64,
        activation="gated-gelu_tanh",
    ),
    "marian-nano": _shape("marian", 2, 128, 4, **_SMALL),
    "marian-base": _shape("marian", 6, 512, 8, 58_101, 512),  # opus-mt-en-de: the base model of the first Transformer
    "vit-nano": _vit(4, 128, 4, 32, 4, 10),
    "vit-micro": _vit(6, 192, 3, 32, 4, 10),
    "vit-tiny": _vit(12, 192, 3),
    "vit-small": _vit(12, 384, 6),
    "vit-base": _vit(12, 768, 12),  # ViT-B/16
    "deit-tiny": _vit(12, 192, 3),  # DeiT's sizes are ViT's: the difference is in how they are trained
    "deit-small": _vit(12, 384, 6),
    "mae-nano": _mae(_vit(4, 128, 4, 32, 4), 2, 64, 4),
    "mae-micro": _mae(_vit(6, 192, 3, 32, 4), 2, 96, 3),
    "mae-tiny": _mae(_vit(12, 192, 3), 2, 96, 3),
    "mae-base": _mae(_vit(12, 768, 12), 8, 512, 16),  # MAE's ViT-B/16 and ViT-L/16
    "mae-large": _mae(_vit(24, 1024, 16), 8, 512, 16),
    "clip-nano": _small_clip(4, 128, 4, 32, 4),
    "clip-micro": _small_clip(6, 192, 3, 64, 8),
    "clip-vit-b32": _clip(32),
    "clip-vit-b16": _clip(16),
}


def resized(shape: ModelConfig, settings: ModelSettings, images: ImageModelSpec | None = None) -> ModelConfig:
    """A shape with the sizes that the settings name. The inner width follows the width, and the number of key-value
    heads follows the heads, in the same proportion unless given. A vit is made for the images that are given."""
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


def shape_of(
    settings: ModelSettings,
    vocabulary: int | None = None,
    length: int | None = None,
    images: ImageModelSpec | None = None,
) -> ModelConfig:
    """The preset's shape with the settings' changes; vocabulary and length, or the images, as published where not
    given."""
    refuse_unknown("model.preset: there is no preset", settings.preset, PRESETS)
    shape = resized(PRESETS[settings.preset], settings, images)
    if shape.style in ("vit", "mae"):
        return shape
    given = {"vocabulary": vocabulary, "length": length}
    return replace(shape, **{name: size for name, size in given.items() if size is not None})


def build(settings: ModelSettings, vocabulary: int | None = None, length: int | None = None) -> Model:
    """A preset's model for this vocabulary and context; the caller gives it its first values with `initialize`."""
    return assemble(shape_of(settings, vocabulary, length))
