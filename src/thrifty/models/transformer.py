"""Decoder, encoder and encoder-decoder Transformers in plain torch, composed of replaceable parts.

Embedding, blocks, attention and norms are arguments, so any norm can be combined with any attention. For the published
models see `families/`. All models return hidden states, and `head` is separate. A loss can therefore compute logits in
chunks.

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
    "text_classification", "token_classification", "image_classification",
]  # fmt: skip
"""Tasks of models."""


class Transformer(nn.Module):
    """Decoder from tokens (b, t) to final hidden states (b, t, d). `head` maps hidden states to logits (b, t, v);
    `logits` does both.

    For packed texts, `segments` (b, t) is the index of each token's text, and tokens attend only to their own text.
    Learned positions restart with each text. Rotary positions continue, because they depend only on distances.
    """

    task: Task = "next_token"
    has_separate_head = True

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
    """Return the position of each token in its text, (b, t). `segments` (b, t) are the text indices of the tokens."""
    place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return place - torch.where(begins, place, 0).cummax(1).values


class Encoder(nn.Module):
    """Bidirectional encoder from tokens (b, t) to hidden states (b, t, d). `keep` (b, t) is False on padding, and no
    token attends to padding. If tokens of a text were dropped, `positions` (b, t) are required. `transform` is the
    module between the last block and the head."""

    task: Task = "masked_token"
    has_separate_head = True

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
    """Encoder or decoder of an encoder-decoder: blocks, the final norm, and relative positions that all blocks
    share."""

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
    """Encoder-decoder from a source (b, s) and target tokens (b, t) to the decoder's hidden states (b, t, d). `keep`
    (b, s) is False on the source's padding. In models with a position table, target tokens from the middle of a text
    require `positions` (b, t). Encoder and decoder share one embedding; `scale` multiplies the head's input."""

    task: Task = "sequence_to_sequence"
    has_separate_head = True

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
    """Initialize the parameters of a model. The model's `law` is the distribution of its matrices. Biases are zero.
    Gains are one, or have the value in the model's `starts`.

    Some laws use `std`. Each parameter has a generator keyed by (seed, name). Initial values are independent of the
    number of blocks, the order of construction and the rank. Only parameters whose names start with `within` are
    initialized.
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
            laws = [(model.law(part, values.shape, std), values) for part, values in _parts(model, name, parameter)]
            if len({law for law, _ in laws}) == 1:  # parts with the same law are sampled together
                laws = [(laws[0][0], parameter)]
            for law, values in laws:
                law.fill(values, generator)


def _parts(model: nn.Module, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a parameter by name: the parameter itself, or the parts of a fused layer."""
    owner = name.removesuffix(".weight")
    # a parameter outside a layer, such as a class token, has no parts
    parts = None if owner == name else getattr(model.get_submodule(owner), "parts", None)
    if parts is None:
        yield owner, parameter
        return
    for part, values in zip(parts, parameter.split(list(parts.values())), strict=True):
        yield f"{owner.rpartition('.')[0]}.{part}", values
