"""Base class of token objectives. The loss of an example is the mean softmax cross-entropy of its predictions.

If the model returns hidden states and has a linear `head`, the loss computes the logits in chunks. Other models return
logits, or an object with an attribute `logits`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.dtensors import is_dtensor
from thrifty.core.objective import Objective, Prediction, output_head
from thrifty.core.setting_bounds import check_bounds
from thrifty.kernels import vocab_parallel_cross_entropy
from thrifty.kernels.chunked_cross_entropy import IGNORED, chunk_step, gradient_norm_scores, linear_cross_entropy
from thrifty.kernels.token_gather import gather_tokens


def prediction_of(model: nn.Module, output: Any, places: Tensor | None = None) -> Prediction:
    """Convert a model's output (b, t, …) to a prediction: hidden states if the model returns them, else logits.

    With `places` (b, k), the prediction has only these k positions.
    """
    head = output_head(model)
    values = output if head is not None else getattr(output, "logits", output)
    if places is not None:
        values = gather_tokens(values, places)
    return Prediction(hidden=values, head=head) if head is not None else Prediction(output=values)


def _is_plain_linear(head: nn.Module | None) -> bool:
    """Return True if the loss may use the weight and bias of a head without calling the head."""
    return type(head) is nn.Linear and "forward" not in vars(head) and not head._forward_hooks


@dataclass(frozen=True)
class TokenCrossEntropy(Objective):
    """Cross-entropy of tokens. Subclasses define `predict`, and `targets` if targets are not the next tokens."""

    step: Callable = chunk_step
    """Function that computes one chunk. `compiled` compiles this function."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")

    def targets(self, batch: Batch) -> Tensor:
        """Return the target tokens, int64 (b, k). By default they are "tokens" without the first token."""
        return batch["tokens"][:, 1:]

    def shares(self, batch: Batch) -> Tensor | None:
        """Return the weight of each prediction within its example, (b, k); None for equal weights.

        Weights of an example sum to 1. A prediction of weight 0 is ignored.
        """
        return None

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        targets, shares = self._counted_targets(batch)
        if _is_plain_linear(prediction.head):
            weight = batch.weight[:, None]
            token_weights = (weight / targets.shape[1]).expand_as(targets) if shares is None else weight * shares
            head = prediction.head
            if is_dtensor(head.weight):
                cross_entropy = vocab_parallel_cross_entropy.linear_cross_entropy
            else:
                cross_entropy = partial(linear_cross_entropy, step=self.step)
            losses, normalizers = cross_entropy(
                prediction.hidden.flatten(0, 1), head.weight, targets.flatten(), token_weights.flatten(), bias=head.bias
            )
        else:
            logits = prediction.logits.float().flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
            normalizers = None  # computed on demand, because computing them here saves the logits a second time
        prediction.normalizers = None if normalizers is None else normalizers.view_as(targets)
        prediction.shares = shares
        losses = losses.view_as(targets)
        return losses.mean(1) if shares is None else (losses * shares).sum(1)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return the logsumexp of the logits of each prediction, (b, k), and 0 for predictions of weight 0."""
        if prediction.normalizers is None and _is_plain_linear(prediction.head):
            self.losses(prediction, batch)
        elif prediction.normalizers is None:
            targets, prediction.shares = self._counted_targets(batch)
            prediction.normalizers = torch.where(targets != IGNORED, prediction.logits.float().logsumexp(-1), 0.0)
        assert prediction.normalizers is not None
        return prediction.normalizers

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return the norm of the loss's gradient with respect to the logits, for each example (b,).

        Without weights of predictions, the gradient is of the sum of the losses instead of their mean. All examples
        then have the same number of predictions, so all norms have the same extra factor.
        """
        targets, shares = self._counted_targets(batch)
        if _is_plain_linear(prediction.head):
            head = prediction.head
            is_divided = is_dtensor(head.weight)
            squares = vocab_parallel_cross_entropy.gradient_norm_scores if is_divided else gradient_norm_scores
            squared = squares(prediction.hidden.flatten(0, 1), head.weight, targets.flatten(), bias=head.bias)
        else:
            probabilities = prediction.logits.float().flatten(0, 1).softmax(-1)
            one_hot = F.one_hot(targets.flatten().clamp(min=0), probabilities.shape[-1])
            squared = torch.where(targets.flatten() != IGNORED, (probabilities - one_hot).square().sum(-1), 0.0)
        squared = squared.view_as(targets)
        return (squared if shares is None else squared * shares.square()).sum(1).sqrt()

    def _counted_targets(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return targets and weights (b, k). Targets of weight 0 become IGNORED; equal weights are None."""
        targets, shares = self.targets(batch), self.shares(batch)
        return (targets, None) if shares is None else (targets.masked_fill(shares == 0, IGNORED), shares)

    def compiled(self, compile: Callable[[Callable], Callable]) -> Self:
        return replace(self, step=compile(self.step))
