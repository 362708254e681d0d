"""CLIP (Radford et al. 2021, arXiv 2103.00020) in plain torch: an image encoder and a caption encoder ("towers").

Both towers end in a projection into one embedding space. Training moves the vectors of an image and its caption close
together. The towers use the blocks of text models and the patch embedding of the Vision Transformer.

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

INITIAL_SCALE = math.log(1 / 0.07)
"""Initial logarithm of the logit scale."""
LARGEST_SCALE = math.log(100)
"""Maximum logarithm of the logit scale."""


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU in CLIP's published weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ImageTower(nn.Module):
    """Encoder of images (b, c, h, w) to unnormalized vectors (b, e). `visible` (b, n) selects n patches; the default is
    all patches."""

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
    """Causal encoder of captions (b, t) to unnormalized vectors (b, e), read at each caption's last token. `keep` (b,
    t) is False on the padding after each caption."""

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
    """CLIP model that maps images (b, c, h, w) and captions (b, t) to vectors (b, 2, e) whose dot products are the
    logits. An image's vector has the norm of the learned logit scale; a caption's vector has norm 1. The learned
    parameter is the logarithm of the scale. The scale is limited to 100. At the limit it still has a gradient, so it
    can decrease again."""

    task: Literal["contrastive"] = "contrastive"
    starts: ClassVar = {"logit_scale": INITIAL_SCALE}

    def __init__(self, image: ImageTower, text: TextTower, law: Law = normal_init):
        super().__init__()
        self.image, self.text, self.law = image, text, law
        self.logit_scale = nn.Parameter(torch.full((1,), INITIAL_SCALE))

    def forward(
        self, images: Tensor, tokens: Tensor, keep: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        image_vectors, caption_vectors = self.of_images(images, visible), self.of_captions(tokens, keep)
        return torch.stack((self.scale.to(image_vectors.dtype) * image_vectors, caption_vectors), 1)

    def of_images(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the unit vectors (b, e) of images."""
        return F.normalize(self.image(images, visible), dim=-1)

    def of_captions(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the unit vectors (b, e) of captions."""
        return F.normalize(self.text(tokens, keep), dim=-1)

    @property
    def scale(self) -> Tensor:
        """Logit scale (1,), the factor of the similarities."""
        beyond = (self.logit_scale.detach() - LARGEST_SCALE).clamp(min=0)
        return (self.logit_scale - beyond).exp()
