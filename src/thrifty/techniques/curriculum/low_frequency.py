"""EfficientTrain (Wang et al. 2022): begin with low-pass filtered images of fewer pixels.

Paper       Wang et al. 2022, EfficientTrain (arXiv 2211.09703), section 4. Sides of 160, 192 and 224 pixels for 60, 20
            and 20 % of the run are from memory (unverified).
Promise     Early steps are cheaper; evaluation sees full images. A small image keeps all frequencies that it can hold,
            because cropping the spectrum causes no aliasing.
Use         small_images = thrifty.apply(image_loader, "low_frequency", total_steps=10_000)
            loss = vit(**next(iter(small_images)), interpolate_pos_encoding=True).loss
Start with  `low_frequency:multiple=8`. Set `multiple` to the side of a patch in pixels, or to a multiple of that side.
Cost        Two Fourier transforms per image in the process that loads data. With `compile` the model is compiled once
            per image size.
Avoid       Images with sharp edges or bounded pixel values, because an ideal low-pass filter rings near edges, also
            beyond [0, 1].
Does not    Accept batches without images. The trainer interpolates the positions of a ViT for smaller images; in your
            own loop, the model must accept them.
"""

from typing import Annotated

from thrifty.core.errors import UsageError
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import Positive, SettingBound
from thrifty.kernels.image_resizing import scaled_side
from thrifty.kernels.low_pass import crop_spectrum
from thrifty.techniques.curriculum._image_size_curriculum import ImageSizeCurriculum


class LowFrequencyCurriculum(ImageSizeCurriculum):
    """Images are the batch field "inputs" of shape (b, c, h, w) or (b, h, w). In your own loop, each batch of the
    loader counts as a step. The paper also uses augmentation that grows stronger; this technique does not change the
    augmentation.
    """

    resized = staticmethod(crop_spectrum)

    fractions: Annotated[tuple[float, ...], SettingBound(above=0, most=1)] = (160 / 224, 192 / 224)
    """Image side of each phase, as a fraction of the full side. A last phase with full images follows."""
    until: tuple[MovingMoment, ...] = (0.6, 0.8)
    """End of each phase in `fractions`: steps, or fractions of the run."""
    multiple: Positive = 8
    """Common divisor of the sides of reduced images, in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.fractions) != len(self.until) or list(self.until) != sorted(self.until):
            raise UsageError(
                f"{self.name}: until '{list(self.until)}' is not {len(self.fractions)} rising ends, one per fraction",
                fix="one end per fraction, in rising order: fractions = [0.7, 0.85], until = [0.6, 0.8]",
            )

    def side_at(self, step: int, side: int) -> int:
        fraction = next((each for each, end in zip(self.fractions, self.until, strict=True) if step < end), 1.0)
        return scaled_side(side, fraction, self.multiple)
