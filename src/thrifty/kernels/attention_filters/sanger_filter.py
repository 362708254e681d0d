"""Sanger filter: keys whose softmax weight, predicted from 4-bit scores, is above a threshold.

Paper: Lu et al. 2021, Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable Architecture
(MICRO). The paper was not read in full: this implementation follows the abstract and the published code.
"""

import torch
from torch import Tensor

from thrifty.kernels.attention_filters.keep_masks import heads_of_keys, with_one


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (…, k) divided by their norm, and the norms (…, 1), in float32."""
    x = x.float()
    length = x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return x / length, length


def quantized(x: Tensor, bits: int, largest: float | Tensor) -> Tensor:
    """Return x rounded to signed `bits`-bit levels, evenly spaced from -largest to largest, in the shape of x. The
    gradient is straight-through.
    """
    levels = 2 ** (bits - 1) - 1
    scale = levels / largest
    rounded = (x * scale).round().clamp(-levels, levels) / scale
    return x + (rounded - x).detach()


def predicted_scores(q: Tensor, k: Tensor, bits: int, largest: tuple[float | Tensor, float | Tensor]) -> Tensor:
    """Return scores (b, h, t, s) of quantized unit vectors, multiplied by the norms and 1 / sqrt(k).

    `largest` contains the assumed largest element of a unit query and of a unit key.
    """
    (q, norm_q), (k, norm_k) = unit_rows(q), unit_rows(heads_of_keys(k, q.shape[1]))
    with torch.autocast(q.device.type, enabled=False):
        products = quantized(q, bits, largest[0]) @ quantized(k, bits, largest[1]).mT
    return products * norm_q * norm_k.mT * q.shape[-1] ** -0.5


def sanger_keep(
    q: Tensor,
    k: Tensor,
    threshold: float,
    bits: int,
    largest: tuple[float, float],
    visible: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return a mask (b, h, t, s) of keys whose predicted softmax weight exceeds `threshold`. A query without such a key
    keeps its likeliest key. A bias (b or 1, h or 1, t, s) is added to the predicted scores.
    """
    scores = predicted_scores(q, k, bits, largest)
    scores = scores if bias is None else scores + bias
    keep = scores.masked_fill(~visible, float("-inf")).softmax(-1) > threshold
    return with_one(keep, scores, visible)
