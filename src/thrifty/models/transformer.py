"""A decoder-only Transformer in plain torch, put together from objects rather than flags.

A `Block` receives its norms, its attention and its feed-forward network; a Llama-style decoder and a GPT-2-style one
differ only in what is handed in (see `presets.py`). The attention core is an attribute: anything that maps
q (b, h, t, k), k and v (b, g, t, k) to (b, h, t, k) can take its place.

Shapes: b batch, t tokens, d width, h heads, g key-value heads, k head width, v vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.core.randomness import keyed_generator
from thrifty.kernels.rotary import rotary_table, rotate

AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of each token over itself and its past, by torch's fused kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Rotary(nn.Module):
    """Turns queries and keys by their position (Su et al. 2021), for up to `length` tokens.

    The table is a buffer that is not part of the state: it follows from the settings.
    """

    start = 0
    """Position of the first token given; above 0 only while text is generated token by token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, frequencies: Tensor, length: int):
        super().__init__()
        for name, table in zip(("cos", "sin"), rotary_table(frequencies, length), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(self.start, self.start + q.shape[-2])
        if here.stop > len(self.cos):
            raise UsageError(
                f"{here.stop} tokens are more than the {len(self.cos)} that this model was built for",
                fix="build it for a longer context, or give it fewer tokens",
            )
        cos, sin = self.cos[here], self.sin[here]
        return rotate(q, cos, sin), rotate(k, cos, sin)


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
    ):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_width = width // heads
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head_width, bias=bias)
        self.out = nn.Linear(heads * self.head_width, width, bias=bias)
        self.position = position
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        split = [self.heads, self.kv_heads, self.kv_heads]
        qkv = self.qkv(x).unflatten(-1, (sum(split), self.head_width)).transpose(1, 2)  # (b, h+2g, t, k)
        q, k, v = qkv.split(split, dim=1)
        if self.position is not None:
            q, k = self.position(q, k)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The two-layer network of the original Transformer, with the activation handed in."""

    def __init__(self, width: int, hidden: int, activation: nn.Module, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = activation
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """Gated feed-forward network (Shazeer 2020, arXiv 2002.05202); `up` holds the gate first, then the value."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has no other notion of order."""

    start = 0
    """Position of the first token given; above 0 only while text is generated token by token."""

    def __init__(self, vocabulary: int, width: int, positions: int = 0):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width) if positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        if self.position is None:
            return x
        return x + self.position(torch.arange(self.start, self.start + tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """One pre-norm residual unit: attention, then the feed-forward network."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens (b, t) to final hidden states (b, t, d); `head` maps those to logits (b, t, v), or `logits` does both.

    The head stays apart so that a loss can work through the vocabulary in chunks.
    """

    def __init__(self, embedding: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module, head: nn.Linear):
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = embedding, nn.ModuleList(blocks), norm, head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self(tokens))


@torch.no_grad()
def initialize(model: Transformer, seed: int, std: float = 0.02) -> None:
    """GPT-2's law: normal(0, 0.02), projections into the residual stream divided by sqrt(2 · blocks), biases zero.

    Each parameter draws from a generator keyed by (seed, its name), so that what it draws does not depend on how
    many blocks the model has, in which order they were built or on which rank.
    """
    residual = 1 / math.sqrt(2 * len(model.blocks))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            scale = residual if name.endswith(("out.weight", "down.weight")) else 1.0
            generator = keyed_generator(f"{seed}/{name}", parameter)
            parameter.normal_(0.0, std * scale, generator=generator)
