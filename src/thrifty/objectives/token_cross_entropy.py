"""What all objectives on tokens share: the mean softmax cross-entropy of each example's predictions.

Works through the vocabulary in chunks where the model keeps its head apart (an attribute `head`, a linear layer); for
other models the output, or its attribute `logits`, is taken as the logits.
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
from thrifty.core.objective import Objective, Prediction
from thrifty.core.setting_bounds import check_bounds
from thrifty.kernels import vocab_parallel_cross_entropy
from thrifty.kernels.chunked_cross_entropy import IGNORED, chunk_step, gradient_norm_scores, linear_cross_entropy
from thrifty.kernels.token_gather import gather_tokens


def prediction_of(model: nn.Module, output: Any, places: Tensor | None = None) -> Prediction:
    """What a model's output (hidden states or logits, b rows of t) says, everywhere or at these places (b, k) only."""
    head = getattr(model, "head", None)
    values = output if head is not None else getattr(output, "logits", output)
    if places is not None:
        values = gather_tokens(values, places)
    return Prediction(hidden=values, head=head) if head is not None else Prediction(given=values)


def _is_plain_linear(head: nn.Module | None) -> bool:
    """Whether a head is nothing but its weight and bias, so that the loss may use those without calling it."""
    return type(head) is nn.Linear and "forward" not in vars(head) and not head._forward_hooks


@dataclass(frozen=True)
class TokenCrossEntropy(Objective):
    """Cross-entropy of tokens. Subclasses define `predict`, and `targets` where they are not the next tokens."""

    step: Callable = chunk_step
    """The arithmetic of one chunk; a compiler may put its own version here."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")

    def targets(self, batch: Batch) -> Tensor:
        """The right tokens, int64 (b, k); those of "tokens" behind the first unless a subclass says otherwise."""
        return batch["tokens"][:, 1:]

    def shares(self, batch: Batch) -> Tensor | None:
        """How much each prediction counts for its example (b, k), with a sum of 1 over k; 0 where it is not to be made.
        None where all count alike."""
        return None

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        targets, shares = self._counted_targets(batch)
        if _is_plain_linear(prediction.head):
            weight = batch.weight[:, None]
            expected = (weight / targets.shape[1]).expand_as(targets) if shares is None else weight * shares
            head = prediction.head
            if is_dtensor(head.weight):
                cross_entropy = vocab_parallel_cross_entropy.linear_cross_entropy
            else:
                cross_entropy = partial(linear_cross_entropy, step=self.step)
            losses, normalizers = cross_entropy(
                prediction.hidden.flatten(0, 1), head.weight, targets.flatten(), expected.flatten(), bias=head.bias
            )
        else:
            logits = prediction.logits.float().flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
            normalizers = None  # which would keep the logits a second time, for those who do not ask
        prediction.normalizers = None if normalizers is None else normalizers.view_as(targets)
        prediction.shares = shares
        losses = losses.view_as(targets)
        return losses.mean(1) if shares is None else (losses * shares).sum(1)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """(b, k), 0 where a prediction does not count."""
        if prediction.normalizers is None and _is_plain_linear(prediction.head):
            self.losses(prediction, batch)
        elif prediction.normalizers is None:
            targets, prediction.shares = self._counted_targets(batch)
            prediction.normalizers = torch.where(targets != IGNORED, prediction.logits.float().logsumexp(-1), 0.0)
        assert prediction.normalizers is not None
        return prediction.normalizers

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Where all examples have as many predictions, of the sum of their losses instead of the mean: a factor that
        all have in common."""
        targets, shares = self._counted_targets(batch)
        if _is_plain_linear(prediction.head):
            head = prediction.head
            is_divided = is_dtensor(head.weight)
            squares = vocab_parallel_cross_entropy.gradient_norm_scores if is_divided else gradient_norm_scores
            squared = squares(prediction.hidden.flatten(0, 1), head.weight, targets.flatten(), bias=head.bias)
        else:
            share = prediction.logits.float().flatten(0, 1).softmax(-1)
            wanted = F.one_hot(targets.flatten().clamp(min=0), share.shape[-1])
            squared = torch.where(targets.flatten() != IGNORED, (share - wanted).square().sum(-1), 0.0)
        squared = squared.view_as(targets)
        return (squared if shares is None else squared * shares.square()).sum(1).sqrt()

    def _counted_targets(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The targets with those that do not count ignored, and how much each counts, if not all alike."""
        targets, shares = self.targets(batch), self.shares(batch)
        return (targets, None) if shares is None else (targets.masked_fill(shares == 0, IGNORED), shares)

    def compiled(self, compile: Callable[[Callable], Callable]) -> Self:
        return replace(self, step=compile(self.step))
