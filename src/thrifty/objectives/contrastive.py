"""Contrastive: which caption belongs to which image, among all pairs of the effective batch.

Paper     Radford et al. 2021, CLIP (arXiv 2103.00020), section 2.3.
Fields    "inputs" (b, c, h, w); "tokens" (b, t); where captions are padded, "keep" (b, t), False on the padding.
Loss      of a pair, half of the cross-entropy of its caption among all captions and half of that of its image among all
          images. With several ranks along the data, those of all ranks: each pair is compared with the whole effective
          batch. Held-out batches are compared within themselves, of as many pairs as the recipe's batch or as are
          evaluated, whichever is fewer: a loss among another number of pairs is another number, up to its logarithm
          where nothing is known.
Measures  accuracy: how often the right one of such a batch is the nearest, mean of both directions. What a model is
          worth over a whole set, `thrifty retrieve` tells.
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
    """Vectors of images and captions in one space, (b, 2, e) as `hidden`."""

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        """All products of these pairs (b, b), captions along the columns."""
        assert self.hidden is not None
        images, captions = self.hidden.unbind(1)
        return images @ captions.T


@dataclass(frozen=True)
class Contrastive(Objective):
    """Images and their captions: each finds the other among all of a batch."""

    learns_from, joint, measured = ("pairs",), True, ("accuracy",)

    def examples(self, batch: Batch) -> Batch:
        if missing := {"inputs", "tokens"} - batch.fields.keys():
            raise UsageError(
                f"objective contrastive needs images and captions, and there are no {' and '.join(sorted(missing))}",
                fix="name data of images with captions, or choose another objective: classification of images",
            )
        return batch

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return PairPrediction(hidden=model(batch["inputs"], batch["tokens"], batch.fields.get("keep")))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        assert prediction.hidden is not None
        data = axis("data")
        # what is held out is the same on all ranks, and is judged on each by itself
        group = data.group or dist.group.WORLD if data.size > 1 and torch.is_grad_enabled() else None
        return contrastive_losses(*prediction.hidden.unbind(1), group)

    @torch.no_grad()
    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        assert prediction.hidden is not None
        images, captions = prediction.hidden.float().unbind(1)
        numbers = torch.arange(len(images), device=images.device)
        hits = [places_of_own(*pair, numbers, numbers) == 0 for pair in ((images, captions), (captions, images))]
        return {"accuracy": torch.stack(hits).float().mean(0)}
