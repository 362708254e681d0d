"""Sliding-window attention (Beltagy et al. 2020): attend only to nearby tokens.

Paper       Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1. Child et al. 2019 (arXiv 1904.10509) and
            Jiang et al. 2023, Mistral 7B (arXiv 2310.06825), use it in decoders.
Promise     Time and memory of attention grow with tokens times window, not with tokens squared. Outputs and gradients
            are as in dense attention with the same mask.
Use         model = thrifty.apply(model, "window", window=16, block=8)
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `window:window=512,block=64`. Raise `window` if the loss rises; set `global_tokens=1` for an encoder with a
            class token.
Cost        Distant tokens are reached only indirectly, because each layer extends the reach by about one window.
Avoid       Texts below about 2,000 tokens, because torch's attention is as fast. Windows much narrower than `block`,
            because whole blocks are computed.
Does not    Use a special GPU kernel yet; on GPUs the matrix products of the blocks run as torch operations.
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
from thrifty.modeling.attention_cores import LATER_HIDDEN, AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import ReplacedAttention


def window_attention(
    rule: VisibilityRule,
    block: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return attention in which `rule` and a boolean mask limit the visible keys.

    q and the result are (b, h, t, k), k and v are (b, g, t, k).
    """
    refuse_other_lengths(q.shape[2], k.shape[2])
    return block_attention(q, k, v, window_grid(q.shape[2], rule, block, q.device), mask, dropout=dropout, bias=bias)


class WindowAttention(ReplacedAttention):
    """Uses the block kernels of attention.block_sparse, so the times measured there also apply here. Masks of the model
    also apply, such as the mask between texts that are packed into a row.
    """

    window: Positive = 512
    """Number of visible tokens, including the token itself. In an encoder, the next `window` - 1 tokens are visible
    too.
    """
    global_tokens: Natural = 0
    """Number of first tokens that attend to every token (in a decoder: every earlier token) and are visible to all."""
    block: Positive = 64
    """Side of a block in tokens."""

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        if site.causal and not site.has_causal_masks:
            LATER_HIDDEN.set(site.module, self.name)
        return partial(window_attention, VisibilityRule(site.causal, self.window, self.global_tokens), self.block)
