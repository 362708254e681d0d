"""Decoder, encoder and encoder–decoder Transformers in plain torch, put together from objects rather than flags.

Which embedding, which blocks with which attention, which norm: all of it is handed in, so that a post-norm decoder or a
pre-norm encoder is a matter of what is put together (see `families/` for the published ones).

All give hidden states, and keep `head` apart so that a loss can work through the vocabulary in chunks.
Shapes: b batch, t tokens, s tokens of a source, d width, v vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.core.randomness import keyed_generator
from thrifty.kernels.tiled_attention import segment_mask
from thrifty.models.attention_layers import RelativePositions, padding_mask
from thrifty.models.contrastive_model import ContrastiveModel
from thrifty.models.init_laws import Law, gpt2_normal, normal_init, xavier_uniform_init
from thrifty.models.masked_autoencoder import MaskedAutoencoder
from thrifty.models.vision_transformer import VisionTransformer

Task = Literal[
    "next_token", "masked_token", "sequence_to_sequence", "classification", "contrastive", "masked_reconstruction",
    "text_classification", "token_classification",
]  # fmt: skip
"""What a model can learn, by what its tokens can see and what they are."""


class Transformer(nn.Module):
    """A decoder: tokens (b, t) to final hidden states (b, t, d); `head` maps those to logits (b, t, v), or `logits`
    does both.

    Where several texts share a row, `segments` (b, t) has the number of each token's text: every text is read as if it
    stood alone. Learned positions start again with each; rotary ones count on, since only distances matter to them.
    """

    task: Task = "next_token"

    def __init__(
        self,
        embedding: nn.Module,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        head: nn.Linear,
        law: Law | None = None,
    ):
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = embedding, nn.ModuleList(blocks), norm, head
        self.law = law or partial(gpt2_normal, blocks=len(blocks))

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        if segments is None:
            x, context = self.embedding(tokens), ()
        else:
            x, context = self.embedding(tokens, segment_positions(segments)), (segment_mask(segments),)
        for block in self.blocks:
            x = block(x, *context)
        return self.norm(x)

    def logits(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        return self.head(self(tokens, segments))


def segment_positions(segments: Tensor) -> Tensor:
    """The position (b, t) of each token in its text, from the number of its text (b, t)."""
    place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return place - torch.where(begins, place, 0).cummax(1).values


class Encoder(nn.Module):
    """Tokens (b, t), each of which sees all others, to hidden states (b, t, d). `keep` (b, t) is False where there is
    only padding: nothing looks there. Tokens that are not all of their text come with their `positions` (b, t).
    `transform` is what stands between the last block and the head."""

    task: Task = "masked_token"

    def __init__(self, embedding: nn.Module, blocks: Sequence[nn.Module], transform: nn.Module, head: nn.Linear):
        super().__init__()
        self.embedding, self.blocks, self.transform, self.head = embedding, nn.ModuleList(blocks), transform, head
        self.law = normal_init

    def forward(self, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x, mask = self.embedding(tokens, positions), padding_mask(keep)
        for block in self.blocks:
            x = block(x, mask)
        return self.transform(x)

    def logits(self, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head(self(tokens, keep, positions))


class BlockStack(nn.Module):
    """One side of an encoder–decoder: blocks, the norm behind them, and positions that all of its blocks share."""

    def __init__(self, blocks: Sequence[nn.Module], norm: nn.Module, relative: RelativePositions | None = None):
        super().__init__()
        self.blocks, self.norm, self.relative = nn.ModuleList(blocks), norm, relative

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        if self.relative is not None:
            mask = self.relative(x.shape[1], mask)
        for block in self.blocks:
            x = block(x, mask, memory, memory_mask)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """A source (b, s) and the tokens so far (b, t) to the decoder's hidden states (b, t, d). `keep` (b, s) is False
    where the source is only padding. Tokens that begin in the middle of a text come with their `positions` (b, t), for
    models with a table of those. One embedding serves both sides; `scale` multiplies what the head is given."""

    task: Task = "sequence_to_sequence"

    def __init__(
        self,
        embedding: nn.Module,
        encoder: BlockStack,
        decoder: BlockStack,
        head: nn.Linear,
        scale: float = 1.0,
        law: Law = xavier_uniform_init,
    ):
        super().__init__()
        self.embedding, self.encoder, self.decoder, self.head = embedding, encoder, decoder, head
        self.scale, self.law = scale, law

    def forward(
        self, source: Tensor, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        mask = padding_mask(keep)
        memory = self.encoder(self.embedding(source), mask)
        hidden = self.decoder(self.embedding(tokens, positions), None, memory, mask)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def logits(
        self, source: Tensor, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        return self.head(self(source, tokens, keep, positions))


@torch.no_grad()
def initialize(
    model: Transformer | Encoder | EncoderDecoder | VisionTransformer | ContrastiveModel | MaskedAutoencoder,
    seed: int,
    std: float = 0.02,
    within: str = "",
) -> None:
    """First values by the model's law: matrices are drawn, gains are one unless the model's `starts` says otherwise,
    biases zero. `std` is for those laws that have one.

    Each parameter draws from a generator keyed by (seed, its name), so that what it draws does not depend on how
    many blocks the model has, in which order they were built or on which rank. With `within` only parameters whose
    names begin so are drawn.
    """
    for name, parameter in model.named_parameters():
        if not name.startswith(within):
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(getattr(model, "starts", {}).get(name, 1.0))
        else:
            generator = keyed_generator(f"{seed}/{name}", parameter)
            drawn = [(model.law(part, values.shape, std), values) for part, values in _parts(model, name, parameter)]
            if len({law for law, _ in drawn}) == 1:  # parts that are drawn alike are drawn as one
                drawn = [(drawn[0][0], parameter)]
            for law, values in drawn:
                law.fill(values, generator)


def _parts(model: nn.Module, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a parameter, by name: itself, or the parts of a product of several layers."""
    owner = name.removesuffix(".weight")
    # a parameter that is no layer's weight, such as a class token, has no parts
    parts = None if owner == name else getattr(model.get_submodule(owner), "parts", None)
    if parts is None:
        yield owner, parameter
        return
    for part, values in zip(parts, parameter.split(list(parts.values())), strict=True):
        yield f"{owner.rpartition('.')[0]}.{part}", values
