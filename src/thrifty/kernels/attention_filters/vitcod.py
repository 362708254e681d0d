"""ViTCoD: one mask per head for all images, made of average attention maps; heads of queries and keys in a code.

Paper: You et al. 2023, ViTCoD: Vision Transformer Acceleration via Dedicated Algorithm and Accelerator Co-Design (HPCA,
arXiv 2210.09573). Read in part, with its published code.
"""

import math

import torch
from torch import Tensor

GLOBAL = 50
"""A key that more queries than this keep is a global token."""


def code_heads(heads: int) -> int:
    """Heads of the code: half, rounded up."""
    return math.ceil(heads / 2)


def through_code(x: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """x (b, h, t, k) through a code of fewer heads and back: encode (c, h), decode (h, c)."""
    return torch.einsum("hc,cg,bgtk->bhtk", decode, encode, x)


def code_loss(x: Tensor, restored: Tensor) -> Tensor:
    """The distance of both (b, h, t, k), one number per example (b,)."""
    return (x - restored).float().square().sum((1, 2, 3)).add(1e-12).sqrt()


def informative_pairs(average: Tensor, cut: float, first: int = 1) -> Tensor:
    """Of average attention maps (…, t, s), rows of which sum to 1, the largest entries of each row until their sum
    reaches `cut`; rows and columns of the `first` tokens are always kept. A mask of the same shape."""
    ordered = average.sort(dim=-1, descending=True, stable=True)
    before = ordered.values.cumsum(-1) - ordered.values
    kept = torch.zeros_like(average, dtype=torch.bool).scatter(-1, ordered.indices, before < cut)
    kept[..., :first, :] = True
    kept[..., :, :first] = True
    return kept


def split_and_conquer(mask: Tensor, limit: int = GLOBAL) -> tuple[Tensor, int]:
    """The tokens of a mask (t, t), True for what is kept, in the order that puts global ones in front, (t,) int64, and
    how many those are: columns with more than `limit` kept pairs."""
    is_global = mask.sum(0) > limit
    order = (~is_global).long().argsort(stable=True)
    return order, int(is_global.sum())


def reordered(mask: Tensor, order: Tensor) -> Tensor:
    """A mask (t, t) with rows and columns in this order."""
    return mask[order][:, order]
