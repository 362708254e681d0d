"""Sanger: keys to which softmax over scores of 4 bits gives more than a threshold.

Paper: Lu et al. 2021, Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable Architecture
(MICRO). Not read in full: what is here follows its abstract and its published code.
"""

import torch
from torch import Tensor

from thrifty.kernels.attention_filters.keep_masks import heads_of_keys, with_one


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (…, k) divided by their length, and that (…, 1), in float32."""
    x = x.float()
    length = x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return x / length, length


def quantized(x: Tensor, bits: int, largest: float | Tensor) -> Tensor:
    """x rounded to `bits` with a sign, evenly from -largest to largest, as numbers again; gradients pass straight
    through."""
    levels = 2 ** (bits - 1) - 1
    scale = levels / largest
    rounded = (x * scale).round().clamp(-levels, levels) / scale
    return x + (rounded - x).detach()


def predicted_scores(q: Tensor, k: Tensor, bits: int, largest: tuple[float | Tensor, float | Tensor]) -> Tensor:
    """Scores (b, h, t, s) from unit vectors of few bits, scaled by the lengths and 1 / sqrt(k). `largest` is what a
    number of a unit query and of a unit key is taken to be at most."""
    (q, of_q), (k, of_k) = unit_rows(q), unit_rows(heads_of_keys(k, q.shape[1]))
    with torch.autocast(q.device.type, enabled=False):
        products = quantized(q, bits, largest[0]) @ quantized(k, bits, largest[1]).mT
    return products * of_q * of_k.mT * q.shape[-1] ** -0.5


def sanger_keep(
    q: Tensor, k: Tensor, threshold: float, bits: int, largest: tuple[float, float], visible: Tensor
) -> Tensor:
    """Keys that get more than `threshold` of the predicted softmax; the most likely one where none does."""
    scores = predicted_scores(q, k, bits, largest)
    keep = scores.masked_fill(~visible, float("-inf")).softmax(-1) > threshold
    return with_one(keep, scores, visible)
