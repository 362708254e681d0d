"""Masked autoencoder (He et al. 2021): remove most image patches and predict their pixels.

Paper       He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (arXiv 2111.06377), sections 3 and 4.1.
Promise     The loss is the mean squared error of the removed patches only. Removed patches are random in each epoch
            and fixed in evaluation.
Use         run = thrifty.train(recipe="mae-digits", budget="2000 steps")
            thrifty.export(run, "encoder")
Start with  `--set objective.name=masked_reconstruction --set objective.rate=0.75`. `objective.normalize=true`
            standardizes each target patch.
Cost        The encoder computes removed patches as blank patches. `data_selection.drop_masked_patches` leaves removed
            patches out of the encoder.
Avoid       Comparing the loss with a loss in nats. With `normalize`, predicting the mean of each patch has a loss of
            about 1.
Does not    Use labels; a classifier can start from the exported encoder. Train a decoder of the user's own: around an
            own Vision Transformer (`thrifty.train(build_vit, images, loss="masked_reconstruction")`), it has two blocks
            of half the width.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction
from thrifty.core.setting_bounds import SettingBound, check_bounds
from thrifty.kernels.example_rng import random_integers, random_subset
from thrifty.kernels.image_patches import blank_patches, match_brightness, patchify, standardize_patches, unpatchify
from thrifty.kernels.token_gather import gather_tokens, scatter_tokens


def split(keys: np.ndarray, total: int, visible: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the patches of an image at random. Return the ascending indices of visible and of removed patches.

    Indices are (b, visible) and (b, total - visible). `keys` (b,) seed the random choice among `total` patches.
    """
    visible_patches = random_subset(random_integers(keys, total), visible)
    is_removed = np.ones((len(keys), total), dtype=bool)
    np.put_along_axis(is_removed, visible_patches, False, axis=1)
    return visible_patches, is_removed.nonzero()[1].reshape(len(keys), total - visible)


def patch_losses(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of predicted patches, (b,).

    Both tensors are (b, m, p · p · c): m patches of p x p pixels with c channels.
    """
    return (predicted.float() - targets).square().mean(-1).mean(-1)


@dataclass(frozen=True)
class MaskedReconstruction(Objective):
    """Mean squared error of the pixels of removed patches.

    Fields    "inputs" (b, c, h, w), the images of t patches; "visible" (b, n) and "removed" (b, t - n), ascending patch
              indices, with n = int(t · (1 - rate)). The example's key seeds the choice: a new choice each time in
              training, always the same in evaluation.

    The model is called as model(images, visible, blanks=True). It returns hidden states (b, t, e) of all patches; its
    `head` maps hidden states to pixels. With `normalize`, each target patch is standardized by its unbiased variance.
    Without `normalize`, the loss has the squared units of the channels.
    """

    learns_from = ("images", "text")
    loss_in = "mean squared error"

    rate: Annotated[float, SettingBound(above=0, below=1)] = 0.75
    """Fraction of the patches that are removed."""
    normalize: bool = True
    """True to standardize each target patch to mean 0 and standard deviation 1."""
    patch: int = 0
    """Side of a patch in pixels, set when the model is built."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")

    def with_patch_size(self, patch: int | None) -> "MaskedReconstruction":
        return self if patch is None else replace(self, patch=patch)

    def examples(self, batch: Batch) -> Batch:
        """Add the indices of visible and removed patches; return the batch unchanged if it already has them."""
        if "visible" in batch.fields:
            return batch
        total = self._patches(batch["inputs"])
        if self.normalize and self.patch**2 * batch["inputs"].shape[1] < 2:
            raise UsageError(
                "a patch of one value has no standard deviation",
                fix="set objective.normalize=false; or set model.patch to 2 or more",
            )
        visible = int(total * (1 - self.rate))
        if not 0 < visible < total:
            raise UsageError(
                f"objective.rate is {self.rate:g}: {visible} of {total} patches would be visible",
                fix="set objective.rate=0.5; or lower model.patch for more patches",
            )
        visible_patches, removed = map(torch.from_numpy, split(batch["key"].numpy(), total, visible))
        return Batch({"inputs": batch["inputs"], "visible": visible_patches, "removed": removed}, batch.weight)

    def _patches(self, images: Tensor) -> int:
        if not self.patch:
            raise UsageError(
                "the patch size of the model is unknown",
                fix="set model.preset=mae-nano, and model.patch to the side of a patch in pixels",
            )
        height, width = images.shape[-2:]
        if height % self.patch or width % self.patch:
            raise UsageError(
                f"images of {height} x {width} pixels cannot be cut into patches of {self.patch} x {self.patch}",
                fix=f"set data.size to a multiple of {self.patch}",
            )
        return (height // self.patch) * (width // self.patch)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        hidden = model(batch["inputs"], batch["visible"], blanks=True)
        return Prediction(output=model.head(gather_tokens(hidden, batch["removed"])))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return patch_losses(prediction.logits, self.targets(batch))

    def targets(self, batch: Batch) -> Tensor:
        """Return the pixels of the m removed patches, (b, m, p · p · c) in float32."""
        pixels = gather_tokens(patchify(batch["inputs"].float(), self.patch), batch["removed"])
        return standardize_patches(pixels) if self.normalize else pixels

    @property
    def pictured(self) -> str:  # type: ignore[override]
        """Caption of the `image_previews`."""
        rescaled = ", each rescaled to the mean and standard deviation of the true patch"
        shown = "Original images, the visible patches, and the images with predicted removed patches"
        return f"{shown}{rescaled if self.normalize else ''}."

    @torch.no_grad()
    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        images, removed = batch["inputs"].float(), batch["removed"]
        pixels, predicted = patchify(images, self.patch), prediction.logits.float()
        if self.normalize:
            predicted = match_brightness(predicted, gather_tokens(pixels, removed))
        merged = scatter_tokens(predicted, removed, pixels, pixels.shape[1])
        return {
            "original": images,
            "masked": blank_patches(images, batch["visible"], self.patch),
            "reconstructed": unpatchify(merged, self.patch, *images.shape[-2:]),
        }

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        errors = (prediction.logits.float() - self.targets(batch)).flatten(1)
        return 2 * errors.norm(dim=1) / errors.shape[1]
