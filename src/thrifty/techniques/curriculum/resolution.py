"""Progressive resolution (Tan and Le 2021): begin training with small images, end with full ones.

Paper       Tan and Le 2021, EfficientNetV2 (arXiv 2104.00298), section 4. For Vision Transformers: AutoProg (Li et al.
            2022, arXiv 2203.14509).
Promise     Early steps are cheaper: an image of half the side has a quarter of the patches. Evaluation sees full
            images.
Use         small_images = thrifty.apply(image_loader, "resolution", total_steps=10_000)
            loss = vit(**next(iter(small_images)), interpolate_pos_encoding=True).loss
Start with  `resolution:start=0.5,until=0.8`, with the side of a patch or a multiple of it as `multiple`.
Cost        With `compile` each size is compiled once.
Avoid       Images of a few pixels, where fine detail is all there is.
Does not    Change the model, which must accept smaller images; a ViT interpolates its positions. Batches without images
            are refused.
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
    """Images are "inputs" of shape (b, c, h, w) or (b, h, w). A loader counts batches as steps. The images are low-pass
    filtered before they are sampled: detail finer than a pixel of the small image is averaged out. The size grows in
    `phases` phases, and the last fifth of the run has full images by default.
    """

    stage, numerics = Stage.RESHAPE, Numerics.DIFFERENT
    claims = frozenset({Claim.RESOLUTION})

    start: Fraction = 0.5
    """Side of the first images as a fraction of the full side."""
    until: StepOrFraction = 0.8
    """First step with full images."""
    phases: Positive = 4
    """Number of phases with smaller images."""
    multiple: Positive = 8
    """Sides are multiples of this number of pixels."""

    def side_at(self, step: int, side: int) -> int:
        return phased_size(step, self.start * side, side, int(self.until), self.multiple, self.phases)

    def batches(self, source: BatchSource) -> BatchSource:
        return resized_images(source, self.name, self.side_at, resize)
