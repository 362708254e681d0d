"""User-defined losses that compare the embeddings of all examples of a batch, such as contrastive losses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.mesh import axis
from thrifty.core.objective import Prediction
from thrifty.kernels.contrastive_loss import contrastive_losses
from thrifty.kernels.functional_collectives import all_gather_single_autograd
from thrifty.objectives.user_loss import UserFunction, UserLoss, UserMetric, UserPrediction, form_of, refuse_constant


@dataclass(frozen=True)
class EmbeddingLoss:
    """Loss that compares the embeddings of all examples of a batch, such as the contrastive loss of a two-tower model.

    `embed(model, batch)` returns the embeddings (b, …) of b examples. `compare(embeddings)` returns losses (b,) or
    their mean. Without `compare`, each example is a pair with the embeddings (b, 2, e), and the loss is that of CLIP
    (Radford et al. 2021, figure 3): the dot products are logits, and each embedding is matched with the other one of
    its pair.

    All examples of the effective batch are compared: `large_batch.gradient_cache` splits their forward pass, and
    data-parallel ranks exchange their embeddings. Gradients reach the model through the embeddings only, so a learned
    temperature must be a factor in `embed`.

    Example::

        def embed(model, batch):
            output = model(**batch)
            return torch.stack((model.logit_scale.exp() * output.image_embeds, output.text_embeds), 1)


        loss = thrifty.EmbeddingLoss(embed)
        run = thrifty.train(clip, pairs, held_out=held_out, loss=loss, techniques=["gradient_cache"])
    """

    embed: UserFunction
    compare: Callable[[Tensor], Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch."""
        return self.losses(self.embed(model, batch)).mean()

    def losses(self, embeddings: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return losses (b,) or their mean, for embeddings (b, …). They are compared with those of all ranks of
        `group`, and a mean is the mean of all ranks. Raises UsageError for shapes that do not fit."""
        if self.compare is None:
            if embeddings.ndim != 3 or embeddings.shape[1] != 2:
                raise UsageError(
                    f"the embeddings are {form_of(embeddings)}, not two vectors (b, 2, e) for each example",
                    fix="return torch.stack((first, second), 1); or pass compare=, a function of the embeddings",
                )
            return contrastive_losses(*embeddings.unbind(1), group)
        everything = embeddings if group is None else all_gather_single_autograd(embeddings.contiguous(), 0, group)
        with torch.autocast("cpu" if embeddings.is_meta else embeddings.device.type, enabled=False):
            values = self.compare(everything.to(torch.promote_types(everything.dtype, torch.float32)))
        if not isinstance(values, Tensor) or values.shape not in ((), (len(everything),)):
            raise UsageError(
                f"compare returns {form_of(values)} for {len(everything)} examples",
                fix="return the mean loss, a scalar; or one loss per example (b,)",
            )
        if not values.ndim or group is None:
            return values.float()
        return values.float().tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


class EmbeddingPrediction(UserPrediction):
    """Prediction whose `hidden` contains the embeddings (b, …)."""

    @property
    def logits(self) -> Tensor:  # type: ignore[override]
        assert self.hidden is not None
        return self.hidden


class EmbeddingObjective(UserLoss):
    """Objective of an `EmbeddingLoss`."""

    joint, may_weigh_parts = True, False

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        assert isinstance(self.loss, EmbeddingLoss)
        embeddings = self._called(self.loss.embed, model, batch, "the embedding function")
        if not isinstance(embeddings, Tensor) or embeddings.ndim < 2 or len(embeddings) != len(batch):
            raise UsageError(
                f"the embedding function returns {form_of(embeddings)} for {len(batch)} examples",
                fix="return one tensor of shape (b, …), such as (b, 2, e) for pairs: torch.stack((first, second), 1)",
            )
        refuse_constant(embeddings, "embeddings")
        return EmbeddingPrediction(hidden=embeddings, model=model)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        assert isinstance(self.loss, EmbeddingLoss) and prediction.hidden is not None
        values = self.loss.losses(prediction.hidden, ranks_to_compare())
        prediction.is_mean = not values.ndim
        return values.expand(len(batch))


def objective_of(
    loss: UserFunction,
    assembled: Callable[[Batch], Any],
    metrics: Mapping[str, UserMetric] | None = None,
    example_unit: int = 1,
) -> UserLoss:
    """Return the objective of a user-defined loss; see `UserLoss`."""
    return (EmbeddingObjective if isinstance(loss, EmbeddingLoss) else UserLoss)(loss, assembled, metrics, example_unit)


def ranks_to_compare() -> dist.ProcessGroup | None:
    """Return the ranks whose examples are compared: the data-parallel ranks in a training step. In an evaluation all
    ranks have the same examples, so the result is None."""
    data = axis("data")
    return data.group or dist.group.WORLD if data.size > 1 and torch.is_grad_enabled() else None
