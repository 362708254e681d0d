"""Losses for a user's own training loop."""

from typing import Literal

from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.chunked_cross_entropy import IGNORED, linear_cross_entropy


def chunked_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of `hidden @ head_weight.T + bias` without storing all logits.

    Args:
        hidden: Hidden states (…, d).
        head_weight: Weight of the head (v, d).
        labels: Labels (…), -100 for tokens without a loss.
        z_loss: Factor of the squared log of the softmax normalizer, which is added (PaLM, arXiv 2204.02311, section 5).
        reduction: "mean" over the labelled tokens; "none" has the shape of `labels`, in float32.

    Raises UsageError if the shapes do not fit.

    Example::

        hidden, head_weight, labels = torch.randn(2, 7, 16), torch.randn(50, 16), torch.randint(50, (2, 7))
        loss = thrifty.losses.chunked_cross_entropy(hidden, head_weight, labels)
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != head_weight.shape[-1]:
        raise UsageError(
            f"hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)} and labels {tuple(labels.shape)} do "
            "not fit",
            fix="pass hidden (…, d), head_weight (v, d) and labels (…)",
        )
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    learned = targets != IGNORED
    # with "sum" and "mean" all learned tokens weigh alike, so that the forward pass leaves the gradients
    expected = None if reduction == "none" or z_loss else learned.float()
    losses, normalizers = linear_cross_entropy(flat, head_weight, targets, expected, bias=bias)
    if z_loss:
        losses = losses + z_loss * normalizers.square()
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / learned.sum()
