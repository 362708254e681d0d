"""The Vision Transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) in plain torch, composed of replaceable parts.

DeiT without a teacher (Touvron et al. 2020, arXiv 2012.12877) is the same model in smaller sizes. The blocks are the
same as in text models; only the embedding and the pooling differ.

Shapes: b batch, c channels, h and w pixels, t tokens (patches row by row, after the optional class token), d width, v
labels.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.kernels.image_resizing import resized_positions
from thrifty.kernels.token_gather import gather_tokens
from thrifty.models.init_laws import Law, vit_uniform

Pool = Literal["class", "mean", "patches"]
"""Input of the head. "class" is the class token. "mean" is the mean of all patches in a model without a class token.
"patches" is the mean of all patches in a model with a class token."""


class PatchEmbedding(nn.Module):
    """Embedding of images (b, c, h, w) to tokens (b, t, d): the class token, then projected patches, plus positions.
    Positions are learned, or `fixed` (1, t, d). The position table is for square images of `side` pixels. For other
    sizes it is interpolated at each call."""

    position: Tensor
    interpolates_positions = True
    """Read by techniques that change the size of images."""

    def __init__(
        self,
        side: int,
        patch: int,
        channels: int,
        width: int,
        pool: Pool = "class",
        bias: bool = True,
        fixed: Tensor | None = None,
    ):
        super().__init__()
        self.before = int(pool != "mean")
        """Number of tokens before the patches."""
        self.side, self.channels, self.patch_size = side, channels, patch
        self.patch = nn.Conv2d(channels, width, patch, patch, bias=bias)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if self.before else None
        if fixed is None:
            self.position = nn.Parameter(torch.zeros(1, self.before + (side // patch) ** 2, width))
        else:
            self.register_buffer("position", fixed)

    def forward(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return tokens (b, t, d). `visible` int64 (b, n) are the indices of the patches to embed; by default all."""
        tokens = self.patches(images) + self.positions(images)[:, self.before :]
        if visible is not None:
            tokens = gather_tokens(tokens, visible)
        if self.class_token is None:
            return tokens
        first = self.class_token + self.position[:, : self.before].to(self.class_token.dtype)
        return torch.cat((first.to(tokens.dtype).expand(len(tokens), -1, -1), tokens), 1)

    def patches(self, images: Tensor) -> Tensor:
        """Return the projected patches (b, t, d) without positions."""
        self.check(images)
        return self.patch(images).flatten(2).mT

    def positions(self, images: Tensor) -> Tensor:
        """Return the positions (1, before + t, d) for images of this size."""
        grid = (images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size)
        positions = resized_positions(self.position, grid, self.before)
        return positions.to(self.patch.weight.dtype)  # a fixed table stays float32

    @torch.no_grad()
    def resize(self, side: int) -> None:
        """Replace the position table by an interpolated table for another image size."""
        if side == self.side:
            return
        grid = (side // self.patch_size,) * 2
        table = resized_positions(self.position, grid, self.before).clone()
        self.position = nn.Parameter(table) if isinstance(self.position, nn.Parameter) else table
        self.side = side

    def check(self, images: Tensor) -> None:
        """Raise UsageError for images of a wrong shape, or with sides that are not multiples of the patch size."""
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise UsageError(
                f"images of shape {tuple(images.shape)} do not fit a model of {self.channels} channels",
                fix=f"pass images of shape (batch, {self.channels}, height, width)",
            )
        if images.shape[2] % self.patch_size or images.shape[3] % self.patch_size:
            raise UsageError(
                f"images of {images.shape[2]} x {images.shape[3]} pixels cannot be cut into patches of "
                f"{self.patch_size} x {self.patch_size}",
                fix=f"set data.size to a multiple of {self.patch_size}",
            )


class VisionTransformer(nn.Module):
    """Vision Transformer that maps images (b, c, h, w) to the final hidden states of all tokens (b, t, d). `pooled`
    computes the head's input from hidden states, and `head` maps this input to logits (b, v). `logits` combines the
    three steps. `visible` (b, n) selects n patches; the default is all patches."""

    task: Literal["classification"] = "classification"

    def __init__(
        self,
        embedding: PatchEmbedding,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        head: nn.Linear,
        pool: Pool = "class",
        law: Law = vit_uniform,
    ):
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = embedding, nn.ModuleList(blocks), norm, head
        self.pool, self.law = pool, law

    def forward(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        x = self.embedding(images, visible)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def pooled(self, hidden: Tensor) -> Tensor:
        """Pool the hidden states (b, t, d) of each image to one vector (b, d)."""
        return hidden[:, 0] if self.pool == "class" else hidden[:, self.embedding.before :].mean(1)

    def logits(self, images: Tensor) -> Tensor:
        return self.head(self.pooled(self(images)))

    def example(self, device: torch.device) -> Tensor:
        """Return one blank image (1, c, h, w) as example input."""
        embedding = self.embedding
        return torch.zeros(1, embedding.channels, embedding.side, embedding.side, device=device)


@torch.no_grad()
def refit(model: VisionTransformer, labels: int, side: int) -> bool:
    """Adapt a trained model to another image size and number of labels; return True if the head is new and
    uninitialized. Positions are interpolated. The head is replaced if the number of labels differs."""
    embedding = model.embedding
    embedding.resize(side)
    if labels == model.head.out_features:
        return False
    model.head = nn.Linear(model.head.in_features, labels, dtype=model.head.weight.dtype)
    return True
