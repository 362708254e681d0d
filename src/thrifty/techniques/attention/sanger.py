"""Sanger (Lu et al. 2021): keep keys whose softmax weight, predicted in 4 bits, exceeds a threshold.

Paper       Lu et al. 2021, Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable
            Architecture (MICRO). Only the abstract and the published code were read.
Promise     The model trains with the masks of Sanger, which keep 8 to 27 % of the query-key pairs in the paper.
            `kernels/attention_filters/sanger_filter.py` packs the masks into rows of processing elements.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            thrifty.apply((model, optimizer), "sanger", total_steps=1000)
Start with  `sanger:threshold=0.02`, as in the published code for most of GLUE. The code's threshold for SQuAD is 0.002.
Cost        More time and memory than dense attention in software, because scores are computed twice and a mask is
            built.
Avoid       Runs that should become faster, because the filter is slow in software. Use attention.block_sparse for
            speed.
Does not    Save time or memory without Sanger's hardware.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from thrifty.core.setting_bounds import Probability, SettingBound
from thrifty.kernels.attention_filters.keep_masks import filtered_attention
from thrifty.kernels.attention_filters.sanger_filter import sanger_keep, unit_rows
from thrifty.modeling.attention_cores import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import CalibratedAttention

UNKNOWN = (1.0, 1.0)
"""Ranges of queries and keys, used to count FLOPs before calibration."""


class Sanger(CalibratedAttention):
    """The range of normalized queries, and of normalized keys, is their largest absolute element, averaged over
    examples and heads. The ranges are measured in the last steps before `from_step`, and then fixed. Rounding has
    straight-through gradients. The mask has no gradient, so the model learns from the exact scores of kept keys. A
    query without a key above the threshold keeps its most likely key (not in the paper).

    Differs from the published code: the published code updates the range by one running average over all examples
    (decay 0.9999). The paper fine-tunes a trained model; here the filter starts at `from_step`.
    """

    threshold: Probability = 0.02
    """Minimum predicted softmax weight of a kept key."""
    bits: Annotated[int, SettingBound(least=2, most=16)] = 4
    """Number of bits of queries and keys for the predicted scores, including the sign."""

    def measure(self, site: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.stack([unit_rows(x)[0].abs().amax((2, 3)).mean() for x in (q, k)])

    def count(self, model: torch.nn.Module, site: AttentionSite) -> int:
        return 2

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        largest = tuple(calibration.get(site.name, UNKNOWN))
        keep = partial(sanger_keep, threshold=self.threshold, bits=self.bits, largest=largest)
        return partial(filtered_attention, keep, site.causal)
