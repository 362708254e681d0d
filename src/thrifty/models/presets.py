"""Sizes of models, from 1M to 8B parameters, and how a model is put together from its sizes.

The small presets are ours: inner width 4 times the width (gpt), or 8/3 times rounded up to a multiple of 64 (llama).
The large ones have the published shape of the model they are named after.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import nn

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.recipe import ModelSettings
from thrifty.kernels.rotary import rotary_frequencies
from thrifty.models.scaled_rotary import Llama3Scaling
from thrifty.models.transformer import Attention, Block, Embedding, FeedForward, Rotary, SwiGLU, Transformer

_SIZES = ("depth", "width", "heads", "kv_heads", "hidden", "vocabulary", "length")


@dataclass(frozen=True)
class Shape:
    """Everything that decides a model's parameters and arithmetic. Raises UsageError where sizes cannot go together."""

    style: Literal["llama", "gpt"]
    depth: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Inner width of the feed-forward network."""
    vocabulary: int
    length: int
    """Tokens of context: the learned positions of gpt, the trained context of llama."""
    tied: bool
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise UsageError(f"model: {name} is {getattr(self, name)}", fix=f"give a {name} of 1 or more")
        if self.width % self.heads:
            divisors = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            near = min(divisors, key=lambda heads: abs(heads - self.heads))
            raise UsageError(
                f"model: width {self.width} does not divide into {self.heads} heads",
                fix=f"set model.heads = {near}, or a width that is a multiple of {self.heads}",
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model: {self.heads} heads cannot share {self.kv_heads} key-value heads equally",
                fix=f"set model.kv_heads to a divisor of {self.heads}",
            )
        if self.style == "llama" and self.head_width % 2:
            raise UsageError(
                f"model: rotary positions turn pairs of channels, and a head is {self.head_width} wide",
                fix=f"set model.width to a multiple of {2 * self.heads}",
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def _gpt(depth: int, width: int, heads: int, vocabulary: int = 50_257, length: int = 1024) -> Shape:
    return Shape("gpt", depth, width, heads, heads, 4 * width, vocabulary, length, tied=True)


_SMALL = {"vocabulary": 4096, "length": 256}
_LLAMA_32 = Llama3Scaling(factor=32.0, low=1.0, high=4.0, original=8192)

PRESETS: dict[str, Shape] = {
    "gpt-nano": _gpt(4, 128, 4, **_SMALL),
    "gpt-micro": _gpt(4, 256, 4, **_SMALL),
    "gpt-mini": _gpt(8, 384, 6, **_SMALL),
    "gpt-small": _gpt(12, 768, 12),  # GPT-2
    "gpt-medium": _gpt(24, 1024, 16),
    "gpt-large": _gpt(36, 1280, 20),
    "gpt-xl": _gpt(48, 1600, 25),
    "llama-nano": Shape("llama", 4, 128, 4, 2, 384, tied=True, **_SMALL),
    "llama-micro": Shape("llama", 4, 256, 4, 2, 704, tied=True, **_SMALL),
    "llama-mini": Shape("llama", 8, 384, 6, 6, 1024, tied=True, **_SMALL),
    "llama-small": Shape("llama", 12, 768, 12, 12, 2048, vocabulary=50_257, length=1024, tied=True),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 1536, 49_152, 8192, tied=True, rope_base=100_000.0),
    "llama-1b": Shape(
        "llama", 16, 2048, 32, 8, 8192, 128_256, 131_072, tied=True, rope_base=500_000.0, rope_scaling=_LLAMA_32
    ),  # Llama 3.2 1B
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 14_336, 128_256, 8192, tied=False, rope_base=500_000.0),  # Llama 3 8B
}


def resized(shape: Shape, settings: ModelSettings) -> Shape:
    """A shape with the sizes that the settings name. The inner width follows the width, and the number of key-value
    heads follows the heads, in the same proportion unless given."""
    given = {field.name: getattr(settings, field.name, None) for field in fields(Shape)}
    changes = {name: value for name, value in given.items() if value is not None}
    if "width" in changes and "hidden" not in changes:
        changes["hidden"] = 32 * math.ceil(changes["width"] * shape.hidden / shape.width / 32)
    if "heads" in changes and "kv_heads" not in changes:
        changes["kv_heads"] = max(1, changes["heads"] * shape.kv_heads // shape.heads)
    return replace(shape, **changes)


def shape_of(settings: ModelSettings, vocabulary: int | None = None, length: int | None = None) -> Shape:
    """The preset's shape with the settings' changes; vocabulary and length as published where not given."""
    if settings.preset not in PRESETS:
        raise UsageError(
            f"model.preset: there is no preset {settings.preset!r}", fix=did_you_mean(settings.preset, PRESETS)
        )
    shape = resized(PRESETS[settings.preset], settings)
    return replace(
        shape,
        vocabulary=shape.vocabulary if vocabulary is None else vocabulary,
        length=shape.length if length is None else length,
    )


def _rotary(shape: Shape) -> Rotary:
    # values even where the weights have none yet: the table follows from the shape, no file brings it
    frequencies = rotary_frequencies(shape.head_width, shape.rope_base, torch.device("cpu"))
    if shape.rope_scaling is not None:
        frequencies = shape.rope_scaling.slowed(frequencies)
    return Rotary(frequencies, shape.length)


def _llama_block(shape: Shape, position: Rotary | None) -> Block:
    return Block(
        nn.RMSNorm(shape.width, eps=shape.norm_eps),
        Attention(shape.width, shape.heads, shape.kv_heads, position=position),
        nn.RMSNorm(shape.width, eps=shape.norm_eps),
        SwiGLU(shape.width, shape.hidden),
    )


def _gpt_block(shape: Shape, position: Rotary | None) -> Block:
    return Block(
        nn.LayerNorm(shape.width, eps=shape.norm_eps),
        Attention(shape.width, shape.heads, shape.kv_heads, bias=True),
        nn.LayerNorm(shape.width, eps=shape.norm_eps),
        FeedForward(shape.width, shape.hidden, nn.GELU(approximate="tanh")),
    )


_STYLES: dict[str, tuple[Callable[[Shape, Rotary | None], Block], type[nn.Module]]] = {
    "llama": (_llama_block, nn.RMSNorm),
    "gpt": (_gpt_block, nn.LayerNorm),
}


def assemble(shape: Shape) -> Transformer:
    """The model of a shape, on the current default device ("meta" allocates nothing); values not yet initialised."""
    block, norm = _STYLES[shape.style]
    position = _rotary(shape) if shape.style == "llama" else None  # one table for all blocks
    model = Transformer(
        Embedding(shape.vocabulary, shape.width, positions=shape.length if shape.style == "gpt" else 0),
        [block(shape, position) for _ in range(shape.depth)],
        norm(shape.width, eps=shape.norm_eps),
        nn.Linear(shape.width, shape.vocabulary, bias=False),
    )
    if shape.tied:
        model.head.weight = model.embedding.token.weight
    return model


def build(settings: ModelSettings, vocabulary: int | None = None, length: int | None = None) -> Transformer:
    """A preset's model for this vocabulary and context; the caller gives it its first values with `initialize`."""
    return assemble(shape_of(settings, vocabulary, length))
