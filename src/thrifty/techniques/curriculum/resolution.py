"""Progressive resolution (Tan and Le 2021): train on small images first, then on full images.

Paper       Tan and Le 2021, EfficientNetV2 (arXiv 2104.00298), section 4. AutoProg (Li et al. 2022, arXiv 2203.14509)
            grows the images of Vision Transformers.
Promise     Early steps are cheaper, because an image of half the side has a quarter of the patches. Evaluation sees
            full images.
Use         small_images = thrifty.apply(image_loader, "resolution", total_steps=10_000)
            loss = vit(**next(iter(small_images)), interpolate_pos_encoding=True).loss
Start with  `resolution:start=0.5,until=0.8`. Set `multiple` to the side of a patch in pixels, or to a multiple of the
            side.
Cost        With `compile` the model is compiled once per image size.
Avoid       Images of a few pixels, because shrinking them removes most information.
Does not    Accept batches without images. The trainer interpolates the positions of a ViT for smaller images; in your
            own loop, the model must accept them.
"""

from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import Fraction, Positive
from thrifty.kernels.image_resizing import resize
from thrifty.techniques.curriculum._image_size_curriculum import ImageSizeCurriculum
from thrifty.techniques.curriculum._size_schedule import phased_size


class ResolutionCurriculum(ImageSizeCurriculum):
    """Images are the batch field "inputs" of shape (b, c, h, w) or (b, h, w). In your own loop, each batch of the
    loader counts as a step. Images are low-pass filtered before resampling, so that detail finer than a new pixel is
    averaged out. The size grows in `phases` phases. By default the last fifth of the run has full images.
    """

    resized = staticmethod(resize)

    start: Fraction = 0.5
    """Side of the first images as a fraction of the full side."""
    until: MovingMoment = 0.8
    """First step with full images."""
    phases: Positive = 4
    """Number of phases with smaller images."""
    multiple: Positive = 8
    """Common divisor of the sides of reduced images, in pixels."""

    def side_at(self, step: int, side: int) -> int:
        return phased_size(step, self.start * side, side, int(self.until), self.multiple, self.phases)
