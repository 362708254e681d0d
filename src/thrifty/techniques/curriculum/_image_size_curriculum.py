"""Base class of curricula that change the size of images."""

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from torch import Tensor, nn

from thrifty.core.batches import BatchSource
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.image_sizes import resized_images
from thrifty.modeling.patch_grid import accept_other_sizes, find_grid


class ImageSizeCurriculum(Technique):
    """A curriculum whose images at each step are `resized(images, height, width)`. A subclass has the setting
    `multiple`, the common divisor of the sides of reduced images in pixels."""

    stage, numerics = Stage.RESHAPE, Numerics.DIFFERENT
    claims = frozenset({Claim.RESOLUTION})
    resized: ClassVar[Callable[[Tensor, int, int], Tensor]]

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"model"})  # in a user's own loop, the model must accept the images itself

    def side_at(self, step: int, side: int) -> int:
        """Return the size at a step for a full side of `side` pixels."""
        raise NotImplementedError

    def model(self, model: nn.Module) -> nn.Module:
        patch, multiple = 1, self.multiple  # type: ignore[attr-defined]
        with suppress(RefusedError):  # a model without patches
            patch = find_grid(model).patch
        if multiple % patch:
            raise RefusedError(
                f"reduced images, with sides of a multiple of {multiple} pixels, cannot be cut into patches of "
                f"{patch} x {patch}",
                fix=f"--set techniques.{self.name}.multiple={patch}",
            )
        accept_other_sizes(model, self.name)
        return model

    def batches(self, source: BatchSource) -> BatchSource:
        return resized_images(source, self.name, self.side_at, type(self).resized)
