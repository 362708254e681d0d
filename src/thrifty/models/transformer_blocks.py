"""Parts of a Transformer: embeddings, feed-forward networks, and the blocks that combine them with attention.

Norms, attention and feed-forward network are arguments of a block. The class of the block determines the position of
the norms.

Shapes: b batch, t tokens, s tokens of a source, d width, v vocabulary.
"""

import torch
from torch import Tensor, nn

from thrifty.models.attention_layers import FusedLinear, refuse_longer


class FeedForward(nn.Module):
    """Two-layer feed-forward network of the original Transformer with any activation."""

    def __init__(self, width: int, hidden: int, activation: nn.Module, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = activation
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedFeedForward(nn.Module):
    """Gated feed-forward network (Shazeer 2020, arXiv 2002.05202). The first half of `up`'s outputs is the gate; the
    second half is the value."""

    def __init__(self, width: int, hidden: int, activation: nn.Module):
        super().__init__()
        self.up = FusedLinear(width, {"gate": hidden, "value": hidden}, bias=False)
        self.activation = activation
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * value)


class SinusoidalPositions(nn.Module):
    """Fixed positions of the original Transformer (Vaswani et al. 2017, section 3.5): all sines, then all cosines, as
    in Marian. The table is a non-persistent buffer."""

    table: Tensor

    def __init__(self, length: int, width: int):
        super().__init__()
        self.num_embeddings = length
        # computed on the CPU even for a meta model, since no file contains the table
        place = torch.arange(length, dtype=torch.float64, device="cpu")
        channel = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
        angle = torch.outer(place, 10_000.0 ** (-channel / width))
        self.register_buffer("table", torch.cat((angle.sin(), angle.cos()), 1).float(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


class TokenEmbedding(nn.Module):
    """Token embedding, times `scale`, plus positions if the model has no other position encoding. `position` maps
    indices (t,) or (b, t) to vectors, for up to `position.num_embeddings` tokens. By default positions count from
    `start`; the argument `positions` (b, t) overrides this."""

    start = 0
    """Position of the first token; above 0 only during generation with a key-value cache."""

    def __init__(self, vocabulary: int, width: int, position: nn.Module | None = None, scale: float = 1.0):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = position
        self.scale = scale

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.token(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is None:
            return x
        stop = self.start + tokens.shape[1]
        refuse_longer(stop, self.position.num_embeddings)
        if positions is None:
            positions = torch.arange(self.start, stop, device=tokens.device)
        return x + self.position(positions).to(x.dtype)  # a fixed table stays float32


class NormedEmbedding(nn.Module):
    """BERT's embedding: the sum of token, learned position and token type, then a norm. The token type is always the
    first."""

    def __init__(self, vocabulary: int, width: int, length: int, types: int, norm: nn.Module):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.token_type = nn.Embedding(types, width)
        self.norm = norm

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return embeddings of tokens; `positions` (b, t) are their positions in the text, by default 0, 1, …"""
        return self.placed(self.token(tokens), positions)

    def placed(self, vectors: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return embeddings for token vectors (b, t, d) at `positions` (b, t)."""
        if positions is None:
            refuse_longer(vectors.shape[1], self.position.num_embeddings)
            positions = torch.arange(vectors.shape[1], device=vectors.device)
        types = self.token_type(torch.zeros_like(positions))
        return self.norm(vectors + types + self.position(positions))


class TransformerBlock(nn.Module):
    """Pre-norm block: attention, optional cross-attention to encoder outputs, then the feed-forward network."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        cross_attention_norm: nn.Module | None = None,
        cross_attention: nn.Module | None = None,
    ):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.cross_attention_norm, self.cross_attention = cross_attention_norm, cross_attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (b, t, d). `mask` is the mask of self-attention, `memory_mask` of cross-attention to
        memory (b, s, d)."""
        x = self.residual(x, self.attention_norm, self.attention, mask)
        if self.cross_attention_norm is not None:
            x = self.residual(x, self.cross_attention_norm, self.cross_attention, memory, memory_mask)
        return self.residual(x, self.mlp_norm, self.mlp)

    def residual(self, x: Tensor, norm: nn.Module, branch: nn.Module, *context: Tensor | None) -> Tensor:
        """Return x plus the output of one branch. Context arguments that are None are not passed to the branch."""
        return x + branch(norm(x), *(extra for extra in context if extra is not None))


class PostNormBlock(TransformerBlock):
    """Post-norm block of the original Transformer, BERT and Marian: the norm follows each sum. Every block's output
    is normalized, and no unnormalized residual stream runs through the model."""

    def residual(self, x: Tensor, norm: nn.Module, branch: nn.Module, *context: Tensor | None) -> Tensor:
        return norm(x + branch(x, *(extra for extra in context if extra is not None)))


class MaskedTokenTransform(nn.Module):
    """BERT's layers between its last block and the head: linear layer, activation, norm."""

    def __init__(self, width: int, activation: nn.Module, norm: nn.Module):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.activation = activation
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))
