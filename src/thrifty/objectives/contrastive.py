"""Contrastive image-text (Radford et al. 2021): match each image with its caption among all of the batch.

Paper       Radford et al. 2021, CLIP (arXiv 2103.00020), section 2.3.
Promise     Every pair is compared with all pairs of the effective batch, across data-parallel ranks. The loss is the
            mean of both directions.
Use         run = thrifty.train(recipe="flip-emoji", data="captions", budget="2000 steps")
            print(thrifty.retrieve(run))
Start with  `--set objective.name=contrastive --set data.batch=128`. A larger batch compares each pair with more others.
Cost        A matrix of similarities as large as the batch squared. Micro-batches require `large_batch.gradient_cache`.
Avoid       Comparing losses of different batch sizes: an untrained model has the logarithm of the batch size.
Does not    Evaluate across held-out batches: `thrifty retrieve` evaluates a whole set.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.mesh import axis
from thrifty.core.objective import Objective, Prediction
from thrifty.kernels.contrastive_loss import contrastive_losses, places_of_own


@dataclass
class PairPrediction(Prediction):
    """Embeddings of images and captions in one space, (b, 2, e) as `hidden`."""

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        """Similarities of all images (rows) and captions (columns), (b, b)."""
        assert self.hidden is not None
        images, captions = self.hidden.unbind(1)
        return images @ captions.T


@dataclass(frozen=True)
class Contrastive(Objective):
    """Symmetric contrastive loss of images and captions.

    Fields    "inputs" (b, c, h, w); "tokens" (b, t); for padded captions "keep" (b, t), False on padding.
    Loss      half of the cross-entropy of the caption among all captions, plus half of that of the image among all
              images, of all data-parallel ranks. A held-out batch is compared within itself. It has the batch size of
              the recipe, or the number of evaluated pairs if that is smaller.
    Metrics   accuracy: how often the right caption or image of a held-out batch is the nearest, mean of both
              directions.
    """

    learns_from, joint, measured = ("pairs",), True, ("accuracy",)

    def examples(self, batch: Batch) -> Batch:
        if missing := {"inputs", "tokens"} - batch.fields.keys():
            raise UsageError(
                f"objective contrastive requires images and captions, but the data has no "
                f"{' and '.join(sorted(missing))}",
                fix="set data.source to images with captions, or objective.name=classification for images",
            )
        return batch

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return PairPrediction(hidden=model(batch["inputs"], batch["tokens"], batch.fields.get("keep")))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        assert prediction.hidden is not None
        data = axis("data")
        # held-out batches are equal on all ranks, so each rank evaluates them alone
        group = data.group or dist.group.WORLD if data.size > 1 and torch.is_grad_enabled() else None
        return contrastive_losses(*prediction.hidden.unbind(1), group)

    @torch.no_grad()
    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        assert prediction.hidden is not None
        images, captions = prediction.hidden.float().unbind(1)
        pair_ids = torch.arange(len(images), device=images.device)
        hits = [places_of_own(*pair, pair_ids, pair_ids) == 0 for pair in ((images, captions), (captions, images))]
        return {"accuracy": torch.stack(hits).float().mean(0)}
