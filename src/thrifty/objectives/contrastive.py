"""Contrastive image-text (Radford et al. 2021): match images and captions of a batch.

Paper       Radford et al. 2021, CLIP (arXiv 2103.00020), section 2.3.
Promise     Each image is compared with all captions of the effective batch, across data-parallel ranks, and each
            caption with all images. The loss is the mean of both directions.
Use         run = thrifty.train(recipe="flip-emoji", data="captions", budget="2000 steps")
            print(thrifty.retrieve(run))
Start with  `--set objective.name=contrastive --set data.batch=128`. A larger batch has more negatives per pair.
Cost        The b · b similarities of an effective batch of b pairs. Micro-batches require `large_batch.gradient_cache`.
Avoid       Comparing losses of different batch sizes, because the loss of an untrained model is log b for b pairs.
Does not    Compare an image with captions of other held-out batches; `thrifty retrieve` evaluates a whole set.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction
from thrifty.kernels.contrastive_loss import contrastive_losses, places_of_own
from thrifty.objectives.embedding_loss import ranks_to_compare


@dataclass
class PairPrediction(Prediction):
    """Prediction whose `hidden` contains the embeddings (b, 2, e): image, then caption, of each pair."""

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        """Similarity matrix (b, b): rows are images, columns are captions."""
        assert self.hidden is not None
        images, captions = self.hidden.unbind(1)
        return images @ captions.T


@dataclass(frozen=True)
class Contrastive(Objective):
    """Symmetric contrastive loss of images and captions.

    Fields    "inputs" (b, c, h, w), the images; "tokens" (b, t), the captions; "keep" (b, t), False on padding, if
              captions are padded.
    Loss      mean of two cross-entropies: the right caption among all captions, and the right image among all images,
              of all data-parallel ranks. An image is not compared with captions of other held-out batches. A held-out
              batch has the batch size of the recipe, or contains all evaluated pairs if these are fewer.
    Metrics   accuracy: fraction of a held-out batch's images whose nearest caption is right, averaged with the fraction
              of captions whose nearest image is right.
    """

    learns_from, joint, measured = ("pairs",), True, ("accuracy",)

    def examples(self, batch: Batch) -> Batch:
        if missing := {"inputs", "tokens"} - batch.fields.keys():
            raise UsageError(
                f"objective contrastive requires images and captions, but the data has no "
                f"{' and '.join(sorted(missing))}",
                fix="set data.source to images with captions; or set objective.name=classification for images",
            )
        return batch

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return PairPrediction(hidden=model(batch["inputs"], batch["tokens"], batch.fields.get("keep")))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        assert prediction.hidden is not None
        return contrastive_losses(*prediction.hidden.unbind(1), ranks_to_compare())

    @torch.no_grad()
    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        assert prediction.hidden is not None
        images, captions = prediction.hidden.float().unbind(1)
        pair_ids = torch.arange(len(images), device=images.device)
        hits = [places_of_own(*pair, pair_ids, pair_ids) == 0 for pair in ((images, captions), (captions, images))]
        return {"accuracy": torch.stack(hits).float().mean(0)}
