"""ELSA: keys at too large an angle to the query, by sign hashes, are left out of attention.

Paper     Ham et al. 2021, ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention (ISCA).
Promise   the keep sets of ELSA, whose accelerator hashes with a fifth of the multiplications that a whole matrix
          takes: attention over those keys is exact. One setting, p: the paper has 0.5, 1, 2 and 4; which of them is
          conservative depends on the accuracy that may be lost (2 for BERT on SQuAD 1.1).
Cost      in software time and memory: all pairs are looked at, and a mask is made. The paper's authors measured their
          filter on a GPU at 3.14 times the time of plain attention; nothing is saved without the hardware.
Avoid     expecting speed. For that: attention.block_sparse.
Note      thresholds are learned block by block from p on training examples, in the last steps of plain attention, and
          held from then on; the paper takes a trained model and trains no further, here the model learns on with its
          filter. The later they are learned, the better they fit it at the end: of a small model of bytes with p = 1,
          those of a tenth of the run left 41 % of the pairs in the end, those of its 60 % left 23 %, about what p means
          of the trained one (one seed). In a decoder n and the largest key are those that a query sees (ours: the paper
          is about encoders). Head widths that are no power of 4 get other factors (ours). A hash has as many bits as a
          head is wide, 64 in the paper: narrow heads are told apart less well (of a trained model of bytes, hashes of
          16 bits found 0.76 of a block's softmax in 21 % of the pairs; of 64 bits, for the same heads, 0.85 in 19 %).
          Signs give no gradient: it goes through the exact scores of kept keys. The hashes' bias, 0.127 rad for width
          64, is computed, not given. The headline of 58 times a V100 is twelve accelerators of 40 nm, attention alone.
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
from thrifty.modeling.attention_sites import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import CalibratedAttention

Numbers = tuple[tuple[float, ...], ...]
"""A small matrix, as numbers: they are there where shapes alone are traced."""
UNKNOWN = 0.5
"""A threshold, where none is learned yet and only work is counted."""


def _keep(q: Tensor, k: Tensor, visible: Tensor, factors: tuple[Numbers, ...], bias: float, threshold: float) -> Tensor:
    matrices = [torch.tensor(numbers, device=q.device) for numbers in factors]
    return elsa_keep(q, k, matrices, bias, threshold, visible)


class Elsa(CalibratedAttention):
    p: Rate = 1.0
    """A key matters that softmax gives more than p / n; 0 keeps all."""
    seed: int = 0
    """Of the projections."""

    def measure(self, place: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        visible = visible_pairs(q.shape[2], k.shape[2], place.causal, mask, q.device)
        samples = threshold_samples(q, k, self.p, visible)
        return samples[visible.any(-1).expand_as(samples)].mean()  # a padded query sees nothing, and needs nothing

    def settle(self, place: AttentionSite, means: Tensor) -> float:
        return float(means[0])

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        if self.p == 0:
            return place.plain
        sizes, threshold = factor_sizes(place.head_width), calibration.get(place.name, UNKNOWN)
        factors = seeded_factors(sizes, self.seed)
        keep = partial(_keep, factors=factors, bias=angle_bias(sizes), threshold=threshold)
        return partial(filtered_attention, keep, place.causal)
