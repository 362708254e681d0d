"""The masked autoencoder (He et al. 2021, arXiv 2111.06377) in plain torch, composed of replaceable parts.

A Vision Transformer encodes the visible patches of an image. A smaller decoder receives the encoder outputs and a
learned mask token for every hidden patch. It predicts the pixels of all patches. The encoder's parameters have the
names of a Vision Transformer, so that other tasks can use the encoder.

Shapes: b batch, c channels, h and w pixels, p side of a patch in pixels, t patches row by row, n visible patches, d
encoder width, e decoder width.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.kernels.image_patches import blank_patches
from thrifty.kernels.image_resizing import resized_positions
from thrifty.kernels.token_gather import gather_tokens, scatter_tokens
from thrifty.models.init_laws import Law, mae_uniform
from thrifty.models.vision_transformer import PatchEmbedding, Pool, VisionTransformer


class PatchDecoder(nn.Module):
    """Decoder that maps encoder states (b, m + n, d) to states (b, t, e) of all t patches. Encoder states belong to m
    tokens that are no patches, such as a class token, and to the n visible patches. `position` (1, 1 + t, e) is fixed,
    and interpolated for other image sizes; its first row is for the m tokens."""

    position: Tensor

    def __init__(self, embed: nn.Linear, position: Tensor, blocks: Sequence[nn.Module], norm: nn.Module):
        super().__init__()
        self.embed = embed
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed.out_features))
        self.register_buffer("position", position)
        self.blocks, self.norm = nn.ModuleList(blocks), norm

    def forward(self, hidden: Tensor, visible: Tensor | None, grid: tuple[int, int]) -> Tensor:
        """Return states (b, t, e). `visible` (b, n) are indices of patches in a `grid` of (rows, columns); None means
        all patches."""
        x, total = self.embed(hidden), grid[0] * grid[1]
        before = x.shape[1] - (total if visible is None else visible.shape[1])
        if visible is not None:
            x = torch.cat((x[:, :before], scatter_tokens(x[:, before:], visible, self.mask_token, total)), 1)
        positions = resized_positions(self.position, grid, 1).to(self.embed.weight.dtype)  # the table stays float32
        x = x + torch.cat((positions[:, :1].expand(-1, before, -1), positions[:, 1:]), 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, before:]


class MaskedAutoencoder(nn.Module):
    """Masked autoencoder that maps images (b, c, h, w) to the decoder's hidden states (b, t, e). `head` maps hidden
    states to pixels (b, t, p · p · c).

    `logits` does both. Pixels are in the order of `kernels.image_patches.patchify`. `visible` (b, n) selects known
    patches; by default all. The encoder receives only the visible patches. With `blanks` the encoder receives all
    patches, with zeros for unknown pixels.
    """

    task: Literal["masked_reconstruction"] = "masked_reconstruction"

    def __init__(
        self,
        embedding: PatchEmbedding,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        decoder: PatchDecoder,
        head: nn.Linear,
        law: Law = mae_uniform,
    ):
        super().__init__()
        self.embedding, self.blocks, self.norm = embedding, nn.ModuleList(blocks), norm
        self.decoder, self.head, self.law = decoder, head, law

    def forward(self, images: Tensor, visible: Tensor | None = None, blanks: bool = False) -> Tensor:
        patch = self.embedding.patch_size
        self.embedding.check(images)
        if blanks and visible is not None:
            hidden = self.encode(blank_patches(images, visible, patch))
            hidden = torch.cat((hidden[:, :1], gather_tokens(hidden[:, 1:], visible)), 1)
        else:
            hidden = self.encode(images, visible)
        return self.decoder(hidden, visible, (images.shape[-2] // patch, images.shape[-1] // patch))

    def encode(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the encoder's final hidden states (b, 1 + n, d), the class token first."""
        x = self.embedding(images, visible)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        return self.head(self(images, visible))

    def example(self, device: torch.device) -> Tensor:
        """Return one blank image (1, c, h, w) as example input."""
        embedding = self.embedding
        return torch.zeros(1, embedding.channels, embedding.side, embedding.side, device=device)

    @torch.no_grad()
    def resize(self, side: int) -> None:
        """Adapt a trained model to another image size by interpolating both position tables."""
        grid = (side // self.embedding.patch_size,) * 2
        self.decoder.position = resized_positions(self.decoder.position, grid, 1).clone()
        self.embedding.resize(side)


@torch.no_grad()
def encoder_alone(model: MaskedAutoencoder, labels: int, pool: Pool) -> VisionTransformer:
    """Return the encoder of a trained autoencoder as a Vision Transformer with a new, uninitialized head. Positions
    become trainable."""
    embedding, table = model.embedding, model.embedding.position.to(model.norm.weight.dtype)
    del embedding.position
    embedding.position = nn.Parameter(table)
    head = nn.Linear(model.norm.normalized_shape[0], labels, dtype=model.norm.weight.dtype)
    return VisionTransformer(embedding, [*model.blocks], model.norm, head, pool)
