"""What a Transformer is stacked from: embeddings, feed-forward networks, and the blocks that join them to attention.

A `TransformerBlock` receives its norms, its attention and its feed-forward network; where the norms stand is the
class's doing.

Shapes: b batch, t tokens, s tokens of a source, d width, v vocabulary.
"""

import torch
from torch import Tensor, nn

from thrifty.models.attention_layers import FusedLinear, refuse_longer


class FeedForward(nn.Module):
    """The two-layer network of the original Transformer, with the activation handed in."""

    def __init__(self, width: int, hidden: int, activation: nn.Module, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = activation
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedFeedForward(nn.Module):
    """Gated feed-forward network (Shazeer 2020, arXiv 2002.05202); `up` holds the gate first, then the value."""

    def __init__(self, width: int, hidden: int, activation: nn.Module):
        super().__init__()
        self.up = FusedLinear(width, {"gate": hidden, "value": hidden}, bias=False)
        self.activation = activation
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * value)


class SinusoidalPositions(nn.Module):
    """The fixed positions of the original Transformer (Vaswani et al. 2017, section 3.5): all sines, then all cosines,
    as Marian orders them. The table is a buffer that is not part of the state."""

    table: Tensor

    def __init__(self, length: int, width: int):
        super().__init__()
        self.num_embeddings = length
        # values even where the weights have none yet: no file brings them
        place = torch.arange(length, dtype=torch.float64, device="cpu")
        channel = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
        angle = torch.outer(place, 10_000.0 ** (-channel / width))
        self.register_buffer("table", torch.cat((angle.sin(), angle.cos()), 1).float(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


class TokenEmbedding(nn.Module):
    """Token embedding, times `scale`, plus positions where the model has no other notion of order: `position` maps
    numbers (t,) or (b, t) to vectors for up to its `num_embeddings` tokens. Positions (b, t) can be given; otherwise
    they count from `start`."""

    start = 0
    """Position of the first token given; above 0 only while text is generated token by token."""

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
        return x + self.position(positions).to(x.dtype)  # a fixed table keeps float32


class NormedEmbedding(nn.Module):
    """BERT's embedding: token, learned position and token type (here always the first), then a norm."""

    def __init__(self, vocabulary: int, width: int, length: int, types: int, norm: nn.Module):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.token_type = nn.Embedding(types, width)
        self.norm = norm

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions` (b, t) say where in its text each token stands; without them it is all of the text."""
        return self.placed(self.token(tokens), positions)

    def placed(self, vectors: Tensor, positions: Tensor | None = None) -> Tensor:
        """What is given for tokens of these vectors (b, t, d) at these positions."""
        if positions is None:
            refuse_longer(vectors.shape[1], self.position.num_embeddings)
            positions = torch.arange(vectors.shape[1], device=vectors.device)
        types = self.token_type(torch.zeros_like(positions))
        return self.norm(vectors + types + self.position(positions))


class TransformerBlock(nn.Module):
    """One pre-norm residual unit: attention, attention over an encoder's memory where there is one, then the
    feed-forward network."""

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
        """x (b, t, d); masks as attention takes them, `mask` for the tokens and `memory_mask` for memory (b, s, d)."""
        x = self.residual(x, self.attention_norm, self.attention, mask)
        if self.cross_attention_norm is not None:
            x = self.residual(x, self.cross_attention_norm, self.cross_attention, memory, memory_mask)
        return self.residual(x, self.mlp_norm, self.mlp)

    def residual(self, x: Tensor, norm: nn.Module, branch: nn.Module, *context: Tensor | None) -> Tensor:
        """x with one branch added to it; the branch is given what there is of its context."""
        return x + branch(norm(x), *(extra for extra in context if extra is not None))


class PostNormBlock(TransformerBlock):
    """The residual unit of the original Transformer, BERT and Marian: the norm stands behind each sum, so that every
    block's output is normalised and no plain sum of residuals runs through the model."""

    def residual(self, x: Tensor, norm: nn.Module, branch: nn.Module, *context: Tensor | None) -> Tensor:
        return norm(x + branch(x, *(extra for extra in context if extra is not None)))


class MaskedTokenTransform(nn.Module):
    """What BERT does between its last block and the head: a linear layer, an activation, a norm."""

    def __init__(self, width: int, activation: nn.Module, norm: nn.Module):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.activation = activation
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))
