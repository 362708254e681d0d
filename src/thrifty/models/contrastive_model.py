"""CLIP (Radford et al. 2021, arXiv 2103.00020) in plain torch: a tower that reads images and one that reads captions.

Both end in a projection into one space, where an image and its caption are to be near each other. Blocks are those of
text models, patches those of the Vision Transformer.

Shapes: b batch, c channels, h and w pixels, n visible patches, t tokens, d width of a tower, e width of the space.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.models.init_laws import Law, normal_init
from thrifty.models.vision_transformer import PatchEmbedding, Pool

FIRST_SCALE = math.log(1 / 0.07)
"""Logarithm of what similarities are multiplied with at first."""
LARGEST_SCALE = math.log(100)
"""And at most."""


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU that CLIP's published weights were trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ImageTower(nn.Module):
    """Images (b, c, h, w) to vectors (b, e) of any length; only the `visible` patches (b, n) are looked at where they
    are given."""

    def __init__(
        self,
        embedding: PatchEmbedding,
        first_norm: nn.Module,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        projection: nn.Linear,
        pool: Pool = "class",
    ):
        super().__init__()
        self.embedding, self.first_norm = embedding, first_norm
        self.blocks, self.norm, self.projection = nn.ModuleList(blocks), norm, projection
        self.pool = pool

    def forward(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        x = self.first_norm(self.embedding(images, visible))
        for block in self.blocks:
            x = block(x)
        if self.pool == "class":
            return self.projection(self.norm(x[:, 0]))
        return self.projection(self.norm(x[:, self.embedding.before :]).mean(1))


class TextTower(nn.Module):
    """Captions (b, t), no token of which sees later ones, to vectors (b, e) of any length: what is known at the last
    token. `keep` (b, t) is False on the padding behind each caption."""

    def __init__(self, embedding: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module, projection: nn.Linear):
        super().__init__()
        self.embedding, self.blocks, self.norm, self.projection = embedding, nn.ModuleList(blocks), norm, projection

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if keep is None:
            last = x[:, -1]
        else:
            place = (keep.sum(1) - 1).clamp(min=0)
            last = x.gather(1, place[:, None, None].expand(-1, -1, x.shape[-1])).squeeze(1)
        return self.projection(self.norm(last))


class ContrastiveModel(nn.Module):
    """Images (b, c, h, w) and captions (b, t) to vectors (b, 2, e) whose products are the logits: of an image the unit
    vector times the learned scale, of a caption the unit vector.

    The scale is kept as its logarithm. It stays at 100 or below, and keeps its gradient there, by which
    it comes back.
    """

    task: Literal["contrastive"] = "contrastive"
    starts: ClassVar = {"logit_scale": FIRST_SCALE}

    def __init__(self, image: ImageTower, text: TextTower, law: Law = normal_init):
        super().__init__()
        self.image, self.text, self.law = image, text, law
        self.logit_scale = nn.Parameter(torch.full((1,), FIRST_SCALE))

    def forward(
        self, images: Tensor, tokens: Tensor, keep: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        of_images, of_captions = self.of_images(images, visible), self.of_captions(tokens, keep)
        return torch.stack((self.scale.to(of_images.dtype) * of_images, of_captions), 1)

    def of_images(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Unit vectors (b, e)."""
        return F.normalize(self.image(images, visible), dim=-1)

    def of_captions(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Unit vectors (b, e)."""
        return F.normalize(self.text(tokens, keep), dim=-1)

    @property
    def scale(self) -> Tensor:
        """What similarities are multiplied with, (1,)."""
        beyond = (self.logit_scale.detach() - LARGEST_SCALE).clamp(min=0)
        return (self.logit_scale - beyond).exp()
