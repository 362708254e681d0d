"""Next token: at each position, the cross-entropy of the token that follows. Fields: "tokens" (b, t+1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction
from thrifty.kernels.cross_entropy import chunk_step, gradient_norm_scores, linear_cross_entropy


def _is_plain_linear(head: nn.Module | None) -> bool:
    """Whether a head is nothing but its weight and bias, so that the loss may use those without calling it."""
    return type(head) is nn.Linear and "forward" not in vars(head) and not head._forward_hooks


@dataclass(frozen=True)
class NextToken(Objective):
    """Works through the vocabulary in chunks where the model keeps its head apart (an attribute `head`, a linear
    layer); for other models the output, or its attribute `logits`, is taken as the logits."""

    step: Callable = chunk_step
    """The arithmetic of one chunk; a compiler may put its own version here."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        output = model(batch["tokens"][:, :-1])
        head = getattr(model, "head", None)
        if head is not None:
            return Prediction(hidden=output, head=head)
        return Prediction(given=getattr(output, "logits", output))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        targets = batch["tokens"][:, 1:]
        if _is_plain_linear(prediction.head):
            expected = (batch.weight / targets.shape[1]).repeat_interleave(targets.shape[1])
            losses, normalizers = linear_cross_entropy(
                prediction.hidden.flatten(0, 1),
                prediction.head.weight,
                targets.flatten(),
                expected,
                bias=prediction.head.bias,
                step=self.step,
            )
        else:
            logits = prediction.logits.float().flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
            normalizers = torch.logsumexp(logits, -1)
        prediction.normalizers = normalizers.view_as(targets)
        return losses.view_as(targets).mean(1)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        if prediction.normalizers is None:
            self.losses(prediction, batch)
        assert prediction.normalizers is not None
        return prediction.normalizers

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        targets = batch["tokens"][:, 1:]
        if _is_plain_linear(prediction.head):
            head = prediction.head
            squared = gradient_norm_scores(
                prediction.hidden.flatten(0, 1), head.weight, targets.flatten(), bias=head.bias
            )
        else:
            share = prediction.logits.float().flatten(0, 1).softmax(-1)
            squared = (share - F.one_hot(targets.flatten(), share.shape[-1])).square().sum(-1)
        return squared.view_as(targets).sum(1).sqrt()

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def compiled(self, compile: Callable[[Callable], Callable]) -> Objective:
        return NextToken(compile(self.step))
