"""Published initialization schemes: the distribution of each matrix's initial values.

A law maps a matrix's name, its size (rows, columns) and a standard deviation to a distribution. For a fused layer the
law is called for each part ("blocks.0.attention.q"), because it may depend on the part's size. Some laws ignore the
standard deviation and use only the size.
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
    """Return the distribution of initial values in GPT (Radford et al. 2018, section 4.1) and BERT: standard deviation
    `std`, by default 0.02, for all matrices. Google's BERT truncates the distribution at two standard deviations;
    transformers and Thrifty do not."""
    return NormalInit(std)


def gpt2_normal(name: str, size: torch.Size, std: float, blocks: int) -> NormalInit:
    """Return the distribution of initial values in GPT-2 (Radford et al. 2019, section 2.3). For projections into the
    residual stream, the standard deviation is divided by sqrt(2 · blocks), because each block has two such projections.
    """
    residual = 1 / math.sqrt(2 * blocks)
    return NormalInit(std * (residual if name.endswith(("out", "down")) else 1.0))


def xavier_uniform_init(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """Return the distribution of initial values of the original Transformer, as in tensor2tensor. Matrices follow
    Glorot and Bengio 2010, equation 16. Token embeddings, which the model multiplies by sqrt(d), have standard
    deviation 1 / sqrt(d). Marian uses the same distribution; transformers initializes Marian with standard deviation
    0.02 throughout."""
    rows, columns = size
    if name.endswith("embedding.token"):
        return NormalInit(columns**-0.5)
    return UniformInit(math.sqrt(6 / (rows + columns)))


def t5_normal(name: str, size: torch.Size, std: float, width: int, head_width: int) -> NormalInit:
    """Return the distribution of T5 (Mesh TensorFlow; transformers at initializer_factor 1).

    The standard deviation is 1 / sqrt(columns). For queries it is divided by sqrt(k), with head width k, because
    attention does not scale its scores. It is 1 for token embeddings, and 1 / sqrt(d) for relative positions, with
    model width d. An untied head is initialized like any matrix, as in Google's t5x. transformers uses 1 for an untied
    head, so its initial logits are sqrt(d) times too large.
    """
    columns = size[1]
    if name.endswith("embedding.token"):
        return NormalInit(1.0)
    if name.endswith("relative.scores"):
        return NormalInit(width**-0.5)
    return NormalInit((columns * head_width) ** -0.5 if name.endswith("attention.q") else columns**-0.5)


def clip_normal(name: str, size: torch.Size, std: float, depths: Mapping[str, int]) -> NormalInit | UniformInit:
    """Return the distribution of the caption tower in CLIP's published code, for both towers. `depths` is the number of
    blocks of each tower.

    With width d, the standard deviation is 1 / sqrt(d) for queries, keys, values and projections. It is 1 / sqrt(2 d)
    for the first feed-forward layer. For layers that add to the residual stream, it is divided by sqrt(2 · blocks),
    because each block has two such layers. It is 0.02 for token embeddings, and 0.01 for positions of captions. It is 1
    / sqrt(d) for positions of patches and the class token. Patch projections have torch's default for convolutions.
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

    Class token, positions and head have the standard deviation `std`. Patch projections have torch's default for
    convolutions. DeiT uses standard deviation 0.02 for matrices too. Glorot's law has a standard deviation of
    0.02 only at a width of 2500. Narrower models with 0.02 make no progress for a long time.
    """
    if name.endswith("embedding.patch"):
        return UniformInit(1 / math.sqrt(math.prod(size[1:])))
    if name.startswith("blocks"):
        return UniformInit(math.sqrt(6 / sum(size)))
    return NormalInit(std)


def mae_uniform(name: str, size: torch.Size, std: float) -> NormalInit | UniformInit:
    """Return the distribution of MAE: every matrix by Glorot and Bengio 2010, equation 16. The patch projection counts
    as a matrix from pixels to channels. Class token and mask token have the standard deviation `std`."""
    if name.endswith("token"):
        return NormalInit(std)
    return UniformInit(math.sqrt(6 / (size[0] + math.prod(size[1:]))))
