"""PatchDropout (Liu et al. 2022): train on a random subset of the patches of each image.

Paper       Liu et al. 2022, PatchDropout (arXiv 2208.07220), for classifiers. Li et al. 2022, FLIP (arXiv 2212.00794),
            trains on images with captions; its released configurations mask half of the patches.
Promise     The image encoder processes the class token and a fraction 1 - `rate` of the patches, at their original
            positions. Evaluation sees all patches.
Use         run = thrifty.train(recipe="vit-digits", techniques=["drop_patches"], budget="2000 steps")
Start with  `drop_patches:rate=0.5,until=0.9`. Keep `until` below 1, so that the last steps train on whole images.
Cost        Each gradient comes from incomplete images. From step `until`, each step costs as much as without the
            technique.
Avoid       Models whose image encoder is a small part of the work, such as image-text models with long captions.
Does not    Reduce the small work of the patch convolution, its norm and the position addition, which process all
            patches.
"""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, class_name, reason_of
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import seed_of
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.example_rng_torch import random_integers_torch, random_subset_torch
from thrifty.modeling.image_sizes import images_of
from thrifty.modeling.visible_patches import prepare, visible_only

FIELD = "patch_key"
"""Name of the batch field with keys (b,), the random bits that select the visible patches of each example."""


def kept_patches(patches: int, rate: float) -> int:
    """Return the number of visible patches of an image, at least 1."""
    return max(1, round(patches * (1 - rate)))


def visible_patches(keys: Tensor, patches: int, rate: float) -> Tensor:
    """Return the ascending indices of visible patches, int64 (b, n). The keys, int64 (b,), select them.

    Every subset of n patches has the same probability.
    """
    return random_subset_torch(random_integers_torch(keys, patches), kept_patches(patches, rate))


def keys_of_content(batch: Batch, step: int) -> Tensor:
    """Return keys (b,) from the bits of each image and the step, for data without the field `key`. Integer sums are
    exact, so a key does not depend on the other examples. Raises RefusedError for batches without images."""
    images = images_of(batch)
    if images is None:
        raise RefusedError(
            "data_selection.drop_patches: the batches have neither images (b, c, h, w) nor the field `key`, which "
            "selects the visible patches",
            fix="add images, or random int64 values (b,) that are fixed for each example",
        )
    bits = images.float().contiguous().view(torch.int32).flatten(1).long()
    draws = torch.Generator().manual_seed(seed_of(f"patches/{step}") % 2**63)
    factors = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=draws) * 2 + 1
    return (bits * factors.to(bits.device)).sum(1)


class PatchDropObjective(WrappedObjective):
    """An objective that drops patches if the batch has the field `patch_key`."""

    def __init__(self, inner: Objective, rate: float):
        super().__init__(inner)
        self.rate = rate

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if "visible" in batch.fields:
            raise RefusedError(
                "data_selection.drop_patches: the objective itself selects the visible patches of its examples",
                fix="--with data_selection.drop_masked_patches; or --set objective.name=classification",
            )
        if FIELD not in batch.fields:
            return super().predict(model, batch)
        with visible_only(model, partial(visible_patches, batch[FIELD], rate=self.rate)):
            try:
                return super().predict(model, batch)
            except (RuntimeError, ValueError, AssertionError) as error:
                if is_out_of_memory(error):
                    raise
                raise RefusedError(
                    f"{class_name(model)} does not accept a part of the patches of an image: {reason_of(error)}",
                    fix="--without data_selection.drop_patches; or use a model whose blocks accept any number of "
                    "tokens, such as a ViT",
                ) from error


class DropPatches(Technique):
    """The subset of visible patches depends only on `seed` and the example's key. So the subset is the same for any
    number of ranks, micro-batches and workers, and after a resume. From step `until`, no patch is dropped, as in FLIP's
    unmasked tuning. Without unmasked tuning, evaluation is the first use of whole images. FLIP trains this phase with a
    hundredth of the learning rate; a schedule that decays to zero has a similar effect here. In FLIP the saved memory
    allows a larger contrastive batch, which is part of the gain (from memory, unverified).

    Works for models with a convolution that cuts the patches, and blocks that accept any number of tokens: models of
    this package, of transformers and timm, and hand-written ones. The estimated footprint describes the last step, so
    with `until` below 1 it describes whole images.
    """

    stage, numerics = Stage.RESHAPE, Numerics.DIFFERENT
    claims = frozenset({Claim.ENCODER_INPUT})

    rate: Annotated[float, SettingBound(above=0, below=1)] = 0.5
    """Fraction of dropped patches."""
    until: MovingMoment = 0.9
    """First step with whole images."""
    seed: int = 0
    """Seed of the random subsets, combined with each example's key."""

    def model(self, model: nn.Module) -> nn.Module:
        add_note(f"{prepare(model)}, {self.rate:.0%} of the patches are dropped before step {self.until}")
        return model

    def batches(self, source: BatchSource) -> BatchSource:
        seed = seed_of(f"{self.name}/{self.seed}")

        def change(step: int, batch: Batch) -> Batch:
            if step >= self.until:
                return batch
            keys = batch["key"] if "key" in batch.fields else keys_of_content(batch, step)
            return Batch({**batch.fields, FIELD: keys ^ seed}, batch.weight, batch.last)

        return MappedSource(source, change)

    def objective(self, objective: Objective) -> Objective:
        return PatchDropObjective(objective, self.rate)
