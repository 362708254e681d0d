"""Progressive resolution: small images first.

Paper     the resizing of Tan & Le 2021, EfficientNetV2 (arXiv 2104.00298), section 4; for Vision Transformers part of
          AutoProg (Li et al. 2022, arXiv 2203.14509). Schedule in phases, the last fifth of the run at full size.
Promise   cheaper early steps: an image of half the side is a quarter of the patches. Whatever is finer than a pixel of
          the small image is averaged out before it is sampled. Evaluation always sees full images.
Use       loader = thrifty.apply(loader, "resolution", total_steps=10_000), counted in batches
Cost      with `compile` each size is compiled once.
Does not  work on batches without images ("inputs" of shape (b, c, h, w) or (b, h, w)), which are refused; change the
          model, which must take smaller images: a ViT interpolates its positions.
Avoid     where fine detail is all there is: images of a few pixels.
Note      sides are multiples of `multiple`: let it be the side of a patch, or a multiple of it.
"""

from thrifty.core.batches import BatchSource
from thrifty.core.claims import Claim
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction, Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.image_resizing import resize
from thrifty.modeling.image_sizes import resized_images
from thrifty.techniques.curriculum._size_schedule import phased_size


class ResolutionCurriculum(Technique):
    stage, numerics = Stage.RESHAPE, Numerics.DIFFERENT
    claims = frozenset({Claim.RESOLUTION})

    start: Fraction = 0.5
    """Side of the first images, as a share of the full side."""
    until: StepOrFraction = 0.8
    """When images are full."""
    phases: Positive = 4
    multiple: Positive = 8

    def side_at(self, step: int, side: int) -> int:
        return phased_size(step, self.start * side, side, int(self.until), self.multiple, self.phases)

    def batches(self, source: BatchSource) -> BatchSource:
        return resized_images(source, self.name, self.side_at, resize)
