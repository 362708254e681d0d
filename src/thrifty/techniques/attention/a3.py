"""A3 (Ham et al. 2020): keep the keys that a greedy search finds as candidates, drop the rest.

Paper       Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA).
Promise     `rounds` · n search rounds over the n keys of a query yield candidates. Those with at least `percent` of the
            largest weight are kept.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            thrifty.apply((model, optimizer), "a3", total_steps=1000)
Start with  `a3:rounds=0.5,percent=5`, the paper's conservative setting. Its aggressive setting is
            `rounds=0.125,percent=10`.
Cost        Slower in software: all products of single elements are sorted, tokens² · width per head. The paper reports
            that one unit of its hardware is slower than a GPU on BERT.
Avoid       Everything but studies of the filter on short texts or small images.
Does not    Save time without the hardware. The model cannot be exported with plain attention unless `export_plain` is
            set.
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


def _candidates(q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float) -> Tensor:
    return torch.ops.thrifty.a3_keep(q, k, visible, rounds, percent)


class A3(ReplacedAttention):
    """Differs from the paper: it sorts each column of keys and pops from heaps; here all products are sorted at once,
    which yields the same set. The model trains with the filter; the paper uses it for inference only. A query
    without a candidate keeps its best key, and n is the number of keys that a query sees (both ours). The paper
    quantizes to 9 bits; here values are not quantized. In the paper six or seven units are faster than a GPU.
    """

    rounds: Fraction = 0.5
    """Search rounds as a fraction of the keys that a query sees."""
    percent: Annotated[float, SettingBound(above=0, most=100)] = 5.0
    """Minimum weight of a kept candidate, in percent of the largest."""
    from_step: StepOrFraction = 0.1

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return partial(filtered_attention, partial(_candidates, rounds=self.rounds, percent=self.percent), site.causal)
