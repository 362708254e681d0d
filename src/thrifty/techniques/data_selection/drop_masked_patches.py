"""Masked autoencoder (He et al. 2021): run the encoder on the visible patches only.

Paper       He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (MAE, arXiv 2111.06377), section 3.
Promise     At a mask rate of 0.75 the encoder processes 25 % of the patches. The paper reports steps three times as
            fast or more for its sizes (unverified).
Use         run = thrifty.train(recipe="mae-digits", techniques=["drop_masked_patches"], budget="2000 steps")
Start with  `drop_masked_patches` and a mask rate of 0.75 (`objective.rate`).
Cost        The decoder still processes every patch, so it must be small.
Avoid       Heavy decoders, and objectives other than masked_reconstruction.
Does not    Change the objective: removed patches, decoder inputs and the loss stay the same. Evaluation also runs the
            encoder on visible patches only.
"""

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.run_notes import add_note
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.token_gather import gather_tokens


def reconstruct_patches(model: nn.Module, images: Tensor, visible: Tensor, removed: Tensor) -> Tensor:
    """Return the predicted pixels (b, m, p · p · c) of the `removed` patches (b, m) of images (b, c, h, w).

    The encoder sees the `visible` patches (b, n) only.
    """
    return model.head(gather_tokens(model(images, visible), removed))


class VisiblePatchObjective(WrappedObjective):
    """A masked-patch objective whose encoder sees visible patches only."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=reconstruct_patches(model, batch["inputs"], batch["visible"], batch["removed"]))


class DropMaskedPatches(Technique):
    """Positions are added to the patches before some are removed, so each patch keeps its own. Mask tokens replace the
    removed patches before the decoder. No value depends on the pixels of removed patches; this also holds in the
    plain run, which sees them blank.
    """

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.ENCODER_INPUT})

    def model(self, model: nn.Module) -> nn.Module:
        if getattr(model, "task", None) != "masked_reconstruction":
            raise RefusedError(
                f"{type(model).__name__} is not a masked autoencoder",
                fix="--set objective.name=masked_reconstruction, and --set model.preset=mae-nano",
            )
        add_note(f"{len(model.blocks)} blocks process visible patches, {len(model.decoder.blocks)} all patches")
        return model

    def objective(self, objective: Objective) -> Objective:
        return VisiblePatchObjective(objective)
