"""A3 (Ham et al. 2020): attend only to candidate keys that a greedy search selects.

Paper       Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA).
Promise     For each query with n keys, a greedy search of `rounds` · n rounds selects candidate keys. Candidates with
            at least `percent` of the largest attention weight are kept.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            thrifty.apply((model, optimizer), "a3", total_steps=1000)
Start with  `a3:rounds=0.5,percent=5`, the paper's conservative setting. Its aggressive setting is
            `rounds=0.125,percent=10`.
Cost        Slower than dense attention in software, because tokens² · width products per head are sorted. The paper
            reports that one unit of its hardware is slower than a GPU on BERT.
Avoid       Runs that should become faster, because the filter is slow in software. Use A3 to study the filter on short
            texts or small images.
Does not    Save time without A3's hardware, or export the model without `export_plain=true`; the exported model attends
            to all keys, so its outputs differ.
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
from thrifty.modeling.attention_cores import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import ReplacedAttention


@torch.library.custom_op("thrifty::a3_keep", mutates_args=())
def _keep(q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float, bias: Tensor | None) -> Tensor:
    return a3_keep(q, k, rounds, percent, visible, bias)


@_keep.register_fake
def _(q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float, bias: Tensor | None) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]), dtype=torch.bool)


def _candidates(
    q: Tensor, k: Tensor, visible: Tensor, rounds: float, percent: float, bias: Tensor | None = None
) -> Tensor:
    return torch.ops.thrifty.a3_keep(q, k, visible, rounds, percent, bias)


class A3(ReplacedAttention):
    """A query without a candidate keeps its best key (not in the paper). In `rounds` · n, n counts only the keys that a
    query sees (not in the paper). In the paper six or seven hardware units together are faster than a GPU.

    Differs from the paper: all products are sorted at once, which selects the same candidates; the paper sorts each
    column of keys and pops from heaps. The model trains with the filter; the paper uses the filter for inference only.
    No tensor is quantized; the paper quantizes to 9 bits.
    """

    rounds: Fraction = 0.5
    """Number of search rounds, as a fraction of the keys that a query sees."""
    percent: Annotated[float, SettingBound(above=0, most=100)] = 5.0
    """Minimum attention weight of a kept candidate, in percent of the query's largest weight."""
    from_step: StepOrFraction = 0.1

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return partial(filtered_attention, partial(_candidates, rounds=self.rounds, percent=self.percent), site.causal)
