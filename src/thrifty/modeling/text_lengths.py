"""Texts whose length changes from step to step."""

from collections.abc import Callable

from torch import Tensor

from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import RefusedError
from thrifty.modeling.attention_cores import has_values

IGNORED = -100
"""Label of positions without a loss, as in torch's cross-entropy."""


def has_only_text(batch: Batch) -> bool:
    """Return True if a batch is plain text: tokens (b, t + 1) and no other fields per position."""
    return batch.fields.keys() - {"key"} == {"tokens"}


def refuse_more_than_tokens(batch: Batch, who: str, first_fix: str = "") -> None:
    """Raise RefusedError if a batch is not plain text. `who` is the technique that the message names, `first_fix` a
    better fix."""
    if not has_only_text(batch):
        others = " and ".join(sorted(batch.fields.keys() - {"tokens", "key"}))
        raise RefusedError(
            f"{who} requires batches of tokens alone; these have {others or 'no tokens'}",
            fix=(f"{first_fix}; or " if first_fix else "") + "train on plain text",
        )


def whole_batch(source: BatchSource, step: int, batch: Batch) -> Batch:
    """Return the whole batch of a step, of which `batch` may be a micro-batch, padded only to its own longest text.
    Micro-batches of plain text are returned as they are, because their texts have full length."""
    is_part = len(batch.weight) < source.size(step) and not has_only_text(batch)
    return source.at(step) if is_part else batch


def text_length(batch: Batch, who: str, first_fix: str = "") -> int:
    """Return the length of the texts in a batch. For plain text, this is the number of tokens with a next token. For a
    user's own data, this is the length t of integer fields (b, t): token ids, masks and labels. Raise RefusedError for
    other batches; `who` is the technique that the message names, `first_fix` a better fix."""
    if has_only_text(batch) or "key" in batch.fields:
        refuse_more_than_tokens(batch, who, first_fix)
        return batch["tokens"].shape[1] - 1
    lengths = {tensor.shape[1] for tensor in batch.fields.values() if is_text(tensor)}
    if len(lengths) != 1 or any(tensor.ndim > 1 and not is_text(tensor) for tensor in batch.fields.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.fields.items())
        raise RefusedError(
            f"{who} can truncate integers (b, t) of one length, but a batch has {shapes}",
            fix=(f"{first_fix}; or " if first_fix else "")
            + "return examples of token ids, masks and labels (t,), and one label for each text",
        )
    mask = batch.fields.get("attention_mask")
    if mask is not None and bool((mask[:, 0] < mask[:, -1]).any()):
        raise RefusedError(f"{who}: texts are padded on the left", fix="tokenizer.padding_side = 'right'")
    return lengths.pop()


def is_text(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point()


def refuse_lost_labels(batch: Batch, length: int, who: str, fix: Callable[[int], str]) -> None:
    """Raise RefusedError if the first `length` tokens of all texts have no label, but later tokens have one. `who` is
    the technique that the message names. `fix` returns the fix for the least length that keeps a label in each text.

    Labels at random places may leave a few texts without a label.
    """
    for name, tensor in batch.fields.items():
        if not is_text(tensor) or not has_values(tensor):
            continue
        has_label = tensor != IGNORED
        if bool(has_label.any()) and not bool(has_label[:, :length].any()):
            least = int(has_label.int().argmax(1).max()) + 1
            raise RefusedError(
                f"{who}: the first {length} tokens of all {len(tensor)} texts have no label, so a step would learn "
                f"nothing ({name!r} is {IGNORED})",
                fix=fix(least),
            )


def truncate_texts(batch: Batch, length: int) -> Batch:
    """Keep the first `length` tokens of each text. In plain text also keep the next token, which is the last target."""
    end = length + has_only_text(batch)
    # contiguous, as a loader's batches are, because losses of users may call view
    fields = {
        name: tensor[:, :end].contiguous() if is_text(tensor) else tensor for name, tensor in batch.fields.items()
    }
    return Batch(fields, batch.weight, batch.last)
