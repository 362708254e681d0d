"""Self-attention and cross-attention, composed of replaceable parts.

The core is an attribute of the module: a function that maps q (b, h, t, k), k and v (b, g, s, k) to (b, h, t, k). The
optional fourth argument of a core is a mask (b, 1 or h, 1 or t, s). A boolean mask is True for visible keys; a float
mask is added to the scores.

Shapes: b batch, t query tokens, s key tokens, d width, h heads, g key-value heads, k head width.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.kernels.rotary_embedding import rotary_table, rotate
from thrifty.kernels.tiled_attention import causal_attention_reference as causal_attention
from thrifty.kernels.tiled_attention import full_attention

AttentionCore = Callable[..., Tensor]


def padding_mask(keep: Tensor | None) -> Tensor | None:
    """Return the attention mask (b, 1, 1, s) of `keep` (b, s), which is False on padding."""
    return None if keep is None else keep[:, None, None, :]


def refuse_longer(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise UsageError(
            f"{tokens} tokens exceed this model's limit of {limit}",
            fix=f"pass at most {limit} tokens; or build the model for a longer context",
        )


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021) for up to `length` tokens: queries and keys are rotated by their position. The
    table is a non-persistent buffer, because it follows from the settings."""

    start = 0
    """Position of the first token; above 0 only during generation with a key-value cache."""

    cos: Tensor
    sin: Tensor

    def __init__(self, frequencies: Tensor, length: int):
        super().__init__()
        for name, table in zip(("cos", "sin"), rotary_table(frequencies, length), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(self.start, self.start + q.shape[-2])
        refuse_longer(here.stop, len(self.cos))
        cos, sin = self.cos[here], self.sin[here]
        return rotate(q, cos, sin), rotate(k, cos, sin)


def relative_bucket(offset: Tensor, buckets: int, distance: int, causal: bool) -> Tensor:
    """Return the index of T5's distance bucket for each offset from query to key (Raffel et al. 2020, arXiv 1910.10683,
    2.1). Half of the buckets hold a single distance each. The remaining buckets grow logarithmically up to `distance`;
    all larger distances share the last bucket. Without `causal`, half of all buckets are for earlier keys and half for
    later keys."""
    if causal:
        side, away = 0, (-offset).clamp(min=0)
    else:
        buckets //= 2
        side, away = buckets * (offset > 0), offset.abs()
    exact = buckets // 2
    # the same float32 operations as in the published code, so that rounding cannot move the edge of a bucket
    growth = torch.log(away.clamp(min=exact).float() / exact) / math.log(distance / exact) * (buckets - exact)
    far = (exact + growth.to(torch.long)).clamp(max=buckets - 1)
    return side + torch.where(away < exact, away, far)


class RelativePositions(nn.Module):
    """T5's relative positions: a learned bias per head and distance bucket, added to the scores of every block."""

    def __init__(self, heads: int, buckets: int = 32, distance: int = 128, causal: bool = False):
        super().__init__()
        self.buckets, self.distance, self.causal = buckets, distance, causal
        self.scores = nn.Embedding(buckets, heads)

    def forward(self, length: int, mask: Tensor | None = None) -> Tensor:
        """Return the bias that is added to the attention scores, (1 or b, h, t, t) for t = `length`. The bias is -inf
        if the mask or causality hides a key."""
        place = torch.arange(length, device=self.scores.weight.device)
        offset = place[None, :] - place[:, None]
        bucket = relative_bucket(offset, self.buckets, self.distance, self.causal)
        scores = self.scores(bucket).permute(2, 0, 1)[None]
        if self.causal:
            scores = scores.masked_fill(offset > 0, -torch.inf)
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


class FusedLinear(nn.Linear):
    """Linear layers with a common input, fused into a single matmul. `parts` maps layer names to numbers of rows."""

    def __init__(self, width: int, parts: Mapping[str, int], bias: bool):
        super().__init__(width, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class Attention(nn.Module):
    """Multi-head attention with h query heads sharing g key-value heads (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        bias: bool = False,
        position: nn.Module | None = None,
        core: AttentionCore = causal_attention,
        head_width: int | None = None,
    ):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_width = head_width or width // heads
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        self.qkv = FusedLinear(width, {"q": queries, "k": keys, "v": keys}, bias)
        self.out = nn.Linear(queries, width, bias=bias)
        self.position = position
        self.core = core

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        split = [self.heads, self.kv_heads, self.kv_heads]
        qkv = self.qkv(x).unflatten(-1, (sum(split), self.head_width)).transpose(1, 2)  # (b, h+2g, t, k)
        q, k, v = qkv.split(split, dim=1)
        if self.position is not None:
            q, k = self.position(q, k)
        seen = self.core(q, k, v) if mask is None else self.core(q, k, v, mask)
        return self.out(seen.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head cross-attention of tokens (b, t, d) to a memory (b, s, d), the output of an encoder."""

    def __init__(
        self,
        width: int,
        heads: int,
        bias: bool = False,
        core: AttentionCore = full_attention,
        head_width: int | None = None,
    ):
        super().__init__()
        self.heads, self.head_width = heads, head_width or width // heads
        inner = self.heads * self.head_width
        self.q = nn.Linear(width, inner, bias=bias)
        self.kv = FusedLinear(width, {"k": inner, "v": inner}, bias)
        self.out = nn.Linear(inner, width, bias=bias)
        self.core = core

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
        kv = self.kv(memory).unflatten(-1, (2 * self.heads, self.head_width)).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        seen = self.core(q, k, v) if mask is None else self.core(q, k, v, mask)
        return self.out(seen.transpose(1, 2).flatten(2))
