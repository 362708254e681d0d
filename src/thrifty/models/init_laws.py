"""Published laws of first values: from which distribution each matrix of a model is drawn.

A law maps a matrix's name, its size (rows, columns) and a standard deviation to a distribution. A product of several
layers in one is asked for part by part ("blocks.0.attention.q"), since their sizes are what a law may depend on. The
standard deviation is that of the laws that have one; the others follow from the sizes alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalInit:
    std: float

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        values.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class UniformInit:
    """Between -bound and bound."""

    bound: float

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        values.uniform_(-self.bound, self.bound, generator=generator)


Law = Callable[[str, torch.Size, float], NormalInit | UniformInit]


def normal_init(name: str, size: torch.Size, std: float) -> NormalInit:
    """GPT (Radford et al. 2018, section 4.1) and BERT: one standard deviation for all, 0.02. Google's BERT cuts the
    distribution at two standard deviations; transformers does not, and neither does this."""
    return NormalInit(std)


def gpt2_normal(name: str, size: torch.Size, std: float, blocks: int) -> NormalInit:
    """GPT-2 (Radford et al. 2019, section 2.3): projections into the residual stream divided by the root of their
    number, 2 · blocks."""
    residual = 1 / math.sqrt(2 * blocks)
    return NormalInit(std * (residual if name.endswith(("out", "down")) else 1.0))


def xavier_uniform_init(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """The original Transformer as tensor2tensor draws it: matrices by Glorot and Bengio 2010, equation 16, and token
    embeddings, which the model multiplies by sqrt(d), with standard deviation 1 / sqrt(d). For Marian, too, which
    transformers draws with 0.02 throughout."""
    rows, columns = size
    if name.endswith("embedding.token"):
        return NormalInit(columns**-0.5)
    return UniformInit(math.sqrt(6 / (rows + columns)))


def t5_normal(name: str, size: torch.Size, std: float, width: int, head_width: int) -> NormalInit:
    """T5 (Mesh TensorFlow; transformers at initializer_factor 1): 1 / sqrt(columns), queries divided by sqrt(k) more,
    since attention does not scale its scores; token embeddings 1, and position scores 1 / sqrt(d).

    A free head is drawn like any matrix, as Google's t5x does; transformers draws it with 1, so that the first logits
    are sqrt(d) times too large.
    """
    columns = size[1]
    if name.endswith("embedding.token"):
        return NormalInit(1.0)
    if name.endswith("relative.scores"):
        return NormalInit(width**-0.5)
    return NormalInit((columns * head_width) ** -0.5 if name.endswith("attention.q") else columns**-0.5)


def clip_normal(name: str, size: torch.Size, std: float, depths: Mapping[str, int]) -> NormalInit | UniformInit:
    """CLIP as its published code draws the captions' tower, for both towers of so many blocks: d being the width, 1 /
    sqrt(d) for queries, keys, values and projections, 1 / sqrt(2 d) into feed-forward networks, and what goes back into
    the residual stream divided by the root of the number of branches. Token embeddings have 0.02, positions of captions
    0.01, and those of patches and the class token 1 / sqrt(d). Patches are as torch draws any convolution."""
    tower, _, inside = name.partition(".")
    if inside == "embedding.patch":
        return UniformInit(1 / math.sqrt(math.prod(size[1:])))
    if inside == "embedding.token":
        return NormalInit(0.02)
    if inside == "embedding.position" and tower == "text":
        return NormalInit(0.01)
    if inside.endswith((".out", ".down")):
        return NormalInit((2 * depths[tower] * size[0]) ** -0.5)
    return NormalInit((2 * size[1]) ** -0.5 if inside.endswith(".up") else size[-1] ** -0.5)


def vit_uniform(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """ViT: matrices by Glorot and Bengio 2010, equation 16; class token, positions and head with one standard
    deviation; patches as torch draws any convolution, by how many pixels they have. DeiT draws matrices with 0.02 too,
    which Glorot's law gives at a width of 2500, and narrow models then stand still for long."""
    if name.endswith("embedding.patch"):
        return UniformInit(1 / math.sqrt(math.prod(size[1:])))
    if name.startswith("blocks"):
        return UniformInit(math.sqrt(6 / sum(size)))
    return NormalInit(std)


def mae_uniform(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """MAE: every matrix by Glorot and Bengio 2010, equation 16, the patches' too, whose kernel counts as a matrix from
    pixels to channels; class and mask token with one standard deviation."""
    if name.endswith("token"):
        return NormalInit(std)
    return UniformInit(math.sqrt(6 / (size[0] + math.prod(size[1:]))))
