"""Masked autoencoder (He et al. 2021): run the encoder on the visible patches only.

Paper       He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (MAE, arXiv 2111.06377), section 3.
Promise     At a mask rate of 0.75 the encoder processes 25 % of the patches. The paper reports training steps at least
            three times as fast for its sizes (unverified).
Use         run = thrifty.train(recipe="mae-digits", techniques=["drop_masked_patches"], budget="2000 steps")
Start with  `drop_masked_patches` and a mask rate of 0.75 (`objective.rate`).
Cost        The decoder still processes every patch, so the decoder must be small.
Avoid       Models with a large decoder, because the encoder is then a small part of the work. Objectives other than
            masked_reconstruction, which are refused.
Does not    Change the masked patches, the decoder inputs or the loss, or run the encoder on masked patches in
            evaluation.
"""

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, class_name
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.run_notes import add_note
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.token_gather import gather_tokens


def reconstruct_patches(model: nn.Module, images: Tensor, visible: Tensor, removed: Tensor) -> Tensor:
    """Predict the pixels of removed patches, with an encoder that processes only the visible patches.

    Images are (b, c, h, w). `visible` (b, n) and `removed` (b, m) are indices of patches of p × p pixels. The result is
    (b, m, p · p · c).
    """
    return model.head(gather_tokens(model(images, visible), removed))


class VisiblePatchObjective(WrappedObjective):
    """A masked-patch objective whose encoder processes visible patches only."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=reconstruct_patches(model, batch["inputs"], batch["visible"], batch["removed"]))


class DropMaskedPatches(Technique):
    """Positions are added before patches are removed, so each visible patch keeps its own position. Mask tokens replace
    the removed patches before the decoder. No predicted value depends on the pixels of removed patches. Without this
    technique, the encoder reads removed patches as blank patches.
    """

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.ENCODER_INPUT})

    def model(self, model: nn.Module) -> nn.Module:
        if getattr(model, "task", None) != "masked_reconstruction":
            raise RefusedError(
                f"{class_name(model)} is not a masked autoencoder",
                fix="--set objective.name=masked_reconstruction --set model.preset=mae-nano",
            )
        add_note(f"{len(model.blocks)} blocks process visible patches, {len(model.decoder.blocks)} all patches")
        return model

    def objective(self, objective: Objective) -> Objective:
        return VisiblePatchObjective(objective)
