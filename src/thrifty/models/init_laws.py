"""Published initialization schemes: the distribution of each matrix's initial values.

A law maps a matrix's name, its size (rows, columns) and a standard deviation to a distribution. For a fused layer it is
called for each part ("blocks.0.attention.q"), since it may depend on the part's size. Laws without a standard deviation
of their own ignore that argument and use the sizes alone.
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
    """A uniform distribution between -bound and bound."""

    bound: float

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        values.uniform_(-self.bound, self.bound, generator=generator)


Law = Callable[[str, torch.Size, float], NormalInit | UniformInit]


def normal_init(name: str, size: torch.Size, std: float) -> NormalInit:
    """Return the distribution of GPT (Radford et al. 2018, section 4.1) and BERT: one standard deviation for all,
    0.02. Google's BERT truncates the distribution at two standard deviations; transformers and Thrifty do not."""
    return NormalInit(std)


def gpt2_normal(name: str, size: torch.Size, std: float, blocks: int) -> NormalInit:
    """Return the distribution of GPT-2 (Radford et al. 2019, section 2.3). The standard deviation of projections
    into the residual stream is divided by the root of their number, 2 · blocks."""
    residual = 1 / math.sqrt(2 * blocks)
    return NormalInit(std * (residual if name.endswith(("out", "down")) else 1.0))


def xavier_uniform_init(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """Return the distribution of the original Transformer in tensor2tensor. Matrices follow Glorot and Bengio 2010,
    equation 16. Token embeddings, which the model multiplies by sqrt(d), have standard deviation 1 / sqrt(d). Marian
    uses it too; transformers initializes Marian with 0.02 throughout."""
    rows, columns = size
    if name.endswith("embedding.token"):
        return NormalInit(columns**-0.5)
    return UniformInit(math.sqrt(6 / (rows + columns)))


def t5_normal(name: str, size: torch.Size, std: float, width: int, head_width: int) -> NormalInit:
    """Return the distribution of T5 (Mesh TensorFlow; transformers at initializer_factor 1).

    The standard deviation is 1 / sqrt(columns); queries are divided by a further sqrt(k), since attention does not
    scale its scores. Token embeddings have 1, relative positions 1 / sqrt(d). An untied head is initialized like any
    matrix, as in Google's t5x. transformers uses 1 for it, so that its initial logits are sqrt(d) times too large.
    """
    columns = size[1]
    if name.endswith("embedding.token"):
        return NormalInit(1.0)
    if name.endswith("relative.scores"):
        return NormalInit(width**-0.5)
    return NormalInit((columns * head_width) ** -0.5 if name.endswith("attention.q") else columns**-0.5)


def clip_normal(name: str, size: torch.Size, std: float, depths: Mapping[str, int]) -> NormalInit | UniformInit:
    """Return the distribution of CLIP's caption tower in its published code, for both towers with these numbers of
    blocks.

    With d the width, queries, keys, values and projections have 1 / sqrt(d), the first feed-forward layer 1 / sqrt(2
    d). Layers that write into the residual stream are divided by the root of the number of branches. Token embeddings
    have 0.02, positions of captions 0.01, positions of patches and the class token 1 / sqrt(d). Patch projections have
    torch's default for convolutions.
    """
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
    """Return the distribution of ViT: matrices by Glorot and Bengio 2010, equation 16.

    Class token, positions and head have the standard deviation `std`; patch projections have torch's default for
    convolutions, by their number of pixels. DeiT uses 0.02 for matrices too. Glorot's law has that value at a width of
    2500, and narrower models with 0.02 make no progress for a long time.
    """
    if name.endswith("embedding.patch"):
        return UniformInit(1 / math.sqrt(math.prod(size[1:])))
    if name.startswith("blocks"):
        return UniformInit(math.sqrt(6 / sum(size)))
    return NormalInit(std)


def mae_uniform(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """Return the distribution of MAE: every matrix by Glorot and Bengio 2010, equation 16. This includes the patch
    projection, as a matrix from pixels to channels. Class token and mask token have the standard deviation `std`."""
    if name.endswith("token"):
        return NormalInit(std)
    return UniformInit(math.sqrt(6 / (size[0] + math.prod(size[1:]))))
