"""Window: each token attends to the tokens near it, and to the first few.

Paper     Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1; for decoders Child et al. 2019 (1904.10509)
          and Jiang et al. 2023, Mistral 7B (2310.06825).
Promise   time and memory of attention grow with tokens times window, not with tokens squared. Forward and backward pass
          go through whole blocks of pairs (`kernels/sparse_attention`), equal to attention under the same mask. What
          that comes to is in the note of `attention.block_sparse`.
Cost      what lies further back is only reached through other tokens: about blocks times window tokens.
Avoid     below some 2,000 tokens, where torch's own attention takes as long; with a window much narrower than `block`,
          since whole blocks are computed.
Note      on GPUs the same products run in torch; there is no kernel of their own for them yet. A mask that the model
          gives, such as that of texts that share a row, holds as well.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from thrifty.core.setting_bounds import Natural, Positive
from thrifty.kernels.attention_filters.keep_masks import refuse_other_lengths
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.kernels.sparse_attention.block_grid import window_grid
from thrifty.kernels.sparse_attention.visibility import VisibilityRule
from thrifty.modeling.attention_sites import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import ReplacedAttention


def window_attention(
    sight: VisibilityRule, block: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of q (b, h, t, k) over those of k and v (b, g, t, k) that a sight, and a boolean mask, show."""
    refuse_other_lengths(q.shape[2], k.shape[2])
    return block_attention(q, k, v, window_grid(q.shape[2], sight, block, q.device), mask)


class WindowAttention(ReplacedAttention):
    window: Positive = 512
    """Tokens that one sees up to itself; in encoders as many from itself on."""
    global_tokens: Natural = 0
    """Tokens at the beginning that all see, and that see all, or all before them."""
    block: Positive = 64
    """Tokens of a block's side."""

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return partial(window_attention, VisibilityRule(place.causal, self.window, self.global_tokens), self.block)
