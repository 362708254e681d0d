"""Drop masked patches: the encoder of a masked autoencoder goes through the visible patches alone.

Paper     He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (MAE, arXiv 2111.06377), section 3: the
          encoder sees what is left; mask tokens take the places of the others in front of the decoder.
Promise   an encoder that goes through 25 % of the patches at a rate of 0.75, and attends among them alone; steps 3
          times as fast or more, as the paper says of its sizes (unverified) and as `benchmarks/bench_mae.py` finds on a
          CPU at 12 blocks of width 192, before a decoder of 2 of width 96.
Does not  change what is learned from: which patches are removed, what the decoder is given and the loss are the
          objective's. Held-out losses are judged in the same way: an encoder that never saw a blank is shown none.
Avoid     a heavy decoder, which still goes through all patches; objectives other than masked_reconstruction.
Note      the positions of patches are added before some are taken away, so each keeps its own. Nothing that is made
          here depends on the pixels of removed patches, nor does it in the plain run, where they are blank.
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
    """The pixels (b, m, p · p · c) that a model gives for the `removed` patches (b, m) of images (b, c, h, w), its
    encoder having looked at the `visible` ones (b, n) alone."""
    return model.head(gather_tokens(model(images, visible), removed))


class VisiblePatchObjective(WrappedObjective):
    """Another objective of masked patches, whose encoder is shown no blanks."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(given=reconstruct_patches(model, batch["inputs"], batch["visible"], batch["removed"]))


class DropMaskedPatches(Technique):
    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.ENCODER_INPUT})

    def model(self, model: nn.Module) -> nn.Module:
        if getattr(model, "task", None) != "masked_reconstruction":
            raise RefusedError(
                f"{type(model).__name__} is no masked autoencoder, whose encoder could go without removed patches",
                fix="set objective.name = masked_reconstruction, and model.preset = mae-nano",
            )
        add_note(f"{len(model.blocks)} blocks go through visible patches, {len(model.decoder.blocks)} through all")
        return model

    def objective(self, objective: Objective) -> Objective:
        return VisiblePatchObjective(objective)
