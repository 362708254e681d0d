"""Sanger: keys to which softmax over 4-bit scores gives more than a threshold.

Paper     Lu et al. 2021, Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable Architecture
          (MICRO). Its body was not read: what is here follows the abstract and the published code.
Promise   training with Sanger's masks in the loop; how they pack into rows of processing elements is in
          `kernels/attention_filters/sanger_filter.py`. The published code has a threshold of 0.002 for SQuAD and 0.02
          for most
          of GLUE, and the abstract keeps 8 to 27 % of the pairs.
Cost      in software time and memory: scores are computed twice, and a mask is made.
Avoid     expecting speed. For that: attention.block_sparse.
Note      the paper fine-tunes a trained model; here attention is plain up to `from_step`. The range of unit queries and
          keys is the mean over examples and heads of the largest number in the last plain steps, and held; the
          published code has a running average of one over all (decay 0.9999). Rounding passes gradients straight
          through, but a mask has none: what is learned is learned from the exact scores of kept keys. A query of which
          no key passes keeps the most likely one (ours).
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from thrifty.core.setting_bounds import Probability, SettingBound
from thrifty.kernels.attention_filters.keep_masks import filtered_attention
from thrifty.kernels.attention_filters.sanger_filter import sanger_keep, unit_rows
from thrifty.modeling.attention_sites import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import CalibratedAttention

UNKNOWN = (1.0, 1.0)
"""Ranges, where none are found yet and only work is counted."""


class Sanger(CalibratedAttention):
    threshold: Probability = 0.02
    """Of the predicted softmax."""
    bits: Annotated[int, SettingBound(least=2, most=16)] = 4
    """Of queries and keys in the prediction, with their sign."""

    def measure(self, place: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        return torch.stack([unit_rows(x)[0].abs().amax((2, 3)).mean() for x in (q, k)])

    def count(self, model: torch.nn.Module, place: AttentionSite) -> int:
        return 2

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        largest = tuple(calibration.get(place.name, UNKNOWN))
        keep = partial(sanger_keep, threshold=self.threshold, bits=self.bits, largest=largest)
        return partial(filtered_attention, keep, place.causal)
