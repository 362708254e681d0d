"""A3: attention over the keys that a greedy search among the largest products of single numbers finds.

Paper     Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA).
Promise   the keep sets of A3: candidates after `rounds` · n rounds of the search, then those with at least `percent` of
          the best one's weight. The paper's conservative setting is 1/2 and 5 %, its aggressive one 1/8 and 10 %.
Cost      in software a great deal: all products of single numbers are sorted, tokens² · width of them for each head.
          The paper's own unit is slower than a GPU on BERT; six or seven overtake it.
Avoid     for anything but studying the filter, with short texts or small images.
Note      the paper sorts each column of keys and pops from heaps; here all products are sorted at once, which gives the
          same set. The model learns with the filter; the paper only infers. A query without a candidate keeps its best
          key, and n is how many keys a query sees (both ours). The paper's numbers are of 9 bits; here they are whole.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction, SettingBound
from thrifty.kernels.attention_filters.a3_filter import a3_keep
from thrifty.kernels.attention_filters.keep_masks import filtered_attention
from thrifty.modeling.attention_sites import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import ReplacedAttention


@torch.library.custom_op("thrifty::a3_keep", mutates_args=())
def _keep(q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float) -> Tensor:
    return a3_keep(q, k, rounds, percent, visible)


@_keep.register_fake
def _(q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]), dtype=torch.bool)


def _found(q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float) -> Tensor:
    return torch.ops.thrifty.a3_keep(q, k, visible, rounds, percent)


class A3(ReplacedAttention):
    rounds: Fraction = 0.5
    """Rounds of the search, as a share of the keys that a query sees."""
    percent: Annotated[float, SettingBound(above=0, most=100)] = 5.0
    """Of the best candidate's weight, below which others are dropped."""
    from_step: StepOrFraction = 0.1

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return partial(filtered_attention, partial(_found, rounds=self.rounds, percent=self.percent), place.causal)
