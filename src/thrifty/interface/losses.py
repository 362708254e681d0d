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
    """Return the cross-entropy of logits `hidden @ head_weight.T + bias`. The logits of all tokens are never stored at
    once.

    Args:
        hidden: Hidden states (…, d).
        head_weight: Weight of the output head (v, d), for v tokens of the vocabulary.
        labels: Labels (…); -100 marks a token without a loss.
        z_loss: Coefficient of the added squared log of the softmax normalizer (PaLM, arXiv 2204.02311, section 5).
        reduction: "mean" averages over the labelled tokens. "none" returns float32 losses with the shape of `labels`.

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
    # with "sum" and "mean" all labelled tokens have equal weight, so the forward pass can compute the gradients
    expected = None if reduction == "none" or z_loss else learned.float()
    losses, normalizers = linear_cross_entropy(flat, head_weight, targets, expected, bias=bias)
    if z_loss:
        losses = losses + z_loss * normalizers.square()
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / learned.sum()
