"""Masked reconstruction: most patches of an image are removed, and their pixels are given back from the others.

Paper     He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (MAE, arXiv 2111.06377), sections 3 and 4.1:
          75 % of the patches are removed; the mean squared error of each removed patch's pixels, averaged over the
          removed ones alone. Targets are standardised patch by patch, with the unbiased variance.
Fields    "inputs" (b, c, h, w); "visible" (b, n) and "removed" (b, t - n), the places of patches in ascending order,
          n = int(t · (1 - rate)). They are drawn by the row's key: other ones each time in training, always the same of
          an image in evaluation.
Note      the plain objective leaves no work out: the encoder goes through all patches, the removed ones blank. Dropping
          them is a technique (data_selection.drop_masked_patches). The loss is no number of nats: with normalisation
          about 1 is what comes of giving back the mean of each patch, without it units are those of the channels.
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
    """Which of `total` patches are visible (b, visible), and which removed (b, total - visible), in ascending order;
    drawn without replacement by `keys` (b,)."""
    seen = random_subset(random_integers(keys, total), visible)
    is_removed = np.ones((len(keys), total), dtype=bool)
    np.put_along_axis(is_removed, seen, False, axis=1)
    return seen, is_removed.nonzero()[1].reshape(len(keys), total - visible)


def patch_losses(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error over pixels, then over patches: (b,) of two tensors (b, m, p · p · c)."""
    return (predicted.float() - wanted).square().mean(-1).mean(-1)


@dataclass(frozen=True)
class MaskedReconstruction(Objective):
    """The masked autoencoder: the pixels of removed patches from the visible ones. The model is called as
    model(images, visible, blanks=True) and gives hidden states (b, t, e) of all patches, which its `head` maps to
    pixels."""

    learns_from = ("images", "text")
    loss_in = "mean squared error"

    rate: Annotated[float, SettingBound(above=0, below=1)] = 0.75
    """Share of the patches that is removed."""
    normalize: bool = True
    """Whether the pixels of a patch are given back less their mean, over their deviation."""
    patch: int = 0
    """Side of a patch in pixels; known once the model is."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")

    def with_patch_size(self, patch: int | None) -> "MaskedReconstruction":
        return self if patch is None else replace(self, patch=patch)

    def examples(self, batch: Batch) -> Batch:
        """Images with their patches numbered; what is split already stays as it is."""
        if "visible" in batch.fields:
            return batch
        total = self._patches(batch["inputs"])
        if self.normalize and self.patch**2 * batch["inputs"].shape[1] < 2:
            raise UsageError(
                "a patch of one number has no deviation", fix="set objective.normalize = false, or model.patch higher"
            )
        visible = int(total * (1 - self.rate))
        if not 0 < visible < total:
            raise UsageError(
                f"of {total} patches {visible} would be visible at a rate of {self.rate:g}",
                fix="set model.patch lower, for more patches, or objective.rate nearer to a half",
            )
        seen, removed = map(torch.from_numpy, split(batch["key"].numpy(), total, visible))
        return Batch({"inputs": batch["inputs"], "visible": seen, "removed": removed}, batch.weight)

    def _patches(self, images: Tensor) -> int:
        if not self.patch:
            raise UsageError(
                "how large patches are is not known of this model",
                fix="set model.preset = mae-nano, and model.patch to the side of the model's patches in pixels",
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
        return Prediction(given=model.head(gather_tokens(hidden, batch["removed"])))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return patch_losses(prediction.logits, self.targets(batch))

    def targets(self, batch: Batch) -> Tensor:
        """The pixels of removed patches (b, m, p · p · c), float32."""
        pixels = gather_tokens(patchify(batch["inputs"].float(), self.patch), batch["removed"])
        return standardize_patches(pixels) if self.normalize else pixels

    @property
    def pictured(self) -> str:  # type: ignore[override]
        """What `image_previews` shows."""
        lent = ", each at the mean and the deviation of the true one, which the loss does not ask for"
        seen = "Images as they are, what the model sees of them, and with the removed patches as it gives them back"
        return f"{seen}{lent if self.normalize else ''}."

    @torch.no_grad()
    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        images, removed = batch["inputs"].float(), batch["removed"]
        pixels, predicted = patchify(images, self.patch), prediction.logits.float()
        if self.normalize:
            predicted = match_brightness(predicted, gather_tokens(pixels, removed))
        together = scatter_tokens(predicted, removed, pixels, pixels.shape[1])
        return {
            "original": images,
            "masked": blank_patches(images, batch["visible"], self.patch),
            "reconstructed": unpatchify(together, self.patch, *images.shape[-2:]),
        }

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        off = (prediction.logits.float() - self.targets(batch)).flatten(1)
        return 2 * off.norm(dim=1) / off.shape[1]
