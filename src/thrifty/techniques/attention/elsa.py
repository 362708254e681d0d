"""ELSA (Ham et al. 2021): skip keys whose hashed angle to the query is too large.

Paper       Ham et al. 2021, ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention (ISCA).
Promise     Attention over the kept keys is exact. In the ELSA accelerator, hashing a vector takes a fifth of the
            multiplications of a full d × d projection.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            thrifty.apply((model, optimizer), "elsa", total_steps=1000)
Start with  `elsa:p=1`. Raise `p` to drop more keys; the paper uses values from 0.5 to 4.
Cost        More time and memory than dense attention in software, because all pairs are compared and a mask is built.
            The paper reports 3.14 times the time of dense attention on a GPU.
Avoid       Runs that should become faster, because the filter is slow in software. Use attention.block_sparse for
            speed.
Does not    Save time or memory without ELSA's hardware; the paper's speedup of 58 over a V100 covers attention alone,
            on twelve accelerators.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thrifty.core.setting_bounds import Rate
from thrifty.kernels.attention_filters.elsa_filter import (
    angle_bias,
    elsa_keep,
    factor_sizes,
    seeded_factors,
    threshold_samples,
)
from thrifty.kernels.attention_filters.keep_masks import filtered_attention, visible_pairs
from thrifty.modeling.attention_cores import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import CalibratedAttention

PlainMatrix = tuple[tuple[float, ...], ...]
"""A small matrix as Python floats, because tensors have no values while shapes are traced."""
UNKNOWN = 0.5
"""Threshold used to count FLOPs before calibration."""


def _keep(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    factors: tuple[PlainMatrix, ...],
    angle: float,
    threshold: float,
    bias: Tensor | None = None,
) -> Tensor:
    matrices = [torch.tensor(numbers, device=q.device) for numbers in factors]
    return elsa_keep(q, k, matrices, angle, threshold, visible, bias)


class Elsa(CalibratedAttention):
    """The threshold of each block is computed from `p` and training examples, in the last steps before `from_step`, and
    then fixed. The paper uses p of 0.5, 1, 2 and 4. The paper's conservative setting of p depends on the accepted drop
    in accuracy; for BERT on SQuAD 1.1 it is 2. A hash has one bit per dimension of the head, 64 in the paper. So hashes
    of narrower heads are less precise. Hashing has no gradient: gradients pass through the exact scores of kept keys.
    The bias of the estimated angles, 0.127 rad for width 64, is computed from random vectors.

    Differs from the paper: training continues with the filter; the paper filters a trained model without more training.
    The paper covers encoders only; in a decoder, n and the largest key norm refer to the keys that a query sees. Head
    widths that are not powers of 4 use other factors of the projection (not in the paper).
    """

    p: Rate = 1.0
    """Threshold: a key is kept if its softmax weight exceeds p / n for n visible keys; 0 keeps all keys."""
    seed: int = 0
    """Seed of the projections."""

    def measure(self, site: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        visible = visible_pairs(q.shape[2], k.shape[2], site.causal, mask, q.device)
        samples = threshold_samples(q, k, self.p, visible, bias)
        return samples[visible.any(-1).expand_as(samples)].mean()  # a padded query sees no keys

    def settle(self, site: AttentionSite, means: Tensor) -> float:
        return float(means[0])

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        if self.p == 0:
            return site.plain
        sizes, threshold = factor_sizes(site.head_width), calibration.get(site.name, UNKNOWN)
        factors = seeded_factors(sizes, self.seed)
        keep = partial(_keep, factors=factors, angle=angle_bias(sizes), threshold=threshold)
        return partial(filtered_attention, keep, site.causal)
