"""Texts that are shorter in some steps than in others."""

from torch import Tensor

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError


def has_only_text(batch: Batch) -> bool:
    """Whether a batch is of plain text: tokens (b, t + 1), and nothing that goes with their places."""
    return batch.fields.keys() - {"key"} == {"tokens"}


def refuse_more_than_tokens(batch: Batch, who: str, otherwise: str = "") -> None:
    """Raises RefusedError where a batch is of anything but plain text; `who` needs it, `otherwise` is another way
    out."""
    if not has_only_text(batch):
        others = " and ".join(sorted(batch.fields.keys() - {"tokens", "key"}))
        raise RefusedError(
            f"{who} needs batches of tokens alone; these have {others or 'no tokens'}",
            fix="use it on plain text" + (f", or {otherwise}" if otherwise else ""),
        )


def text_length(batch: Batch, who: str) -> int:
    """Return the tokens of each text: those that are followed by another in plain text, and all in data of the user's
    own, whose integers (b, t) are texts, masks and labels of tokens. Raises RefusedError in the name of `who` for other
    batches."""
    if has_only_text(batch) or "key" in batch.fields:
        refuse_more_than_tokens(batch, who)
        return batch["tokens"].shape[1] - 1
    lengths = {tensor.shape[1] for tensor in batch.fields.values() if is_text(tensor)}
    if len(lengths) != 1 or any(tensor.ndim > 1 and not is_text(tensor) for tensor in batch.fields.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.fields.items())
        raise RefusedError(
            f"{who}: texts to be cut are integers (b, t) of one length, and a batch has {shapes}",
            fix="let examples be token ids, masks and labels (t,), and one label for each text",
        )
    mask = batch.fields.get("attention_mask")
    if mask is not None and bool((mask[:, 0] < mask[:, -1]).any()):
        raise RefusedError(f"{who}: texts are padded on the left", fix="padding_side='right'")
    return lengths.pop()


def is_text(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point()


def truncate_texts(batch: Batch, length: int) -> Batch:
    """The first `length` tokens of each text, in plain text also the one behind them, which the last of them
    predicts."""
    kept = length + has_only_text(batch)
    fields = {name: tensor[:, :kept] if is_text(tensor) else tensor for name, tensor in batch.fields.items()}
    return Batch(fields, batch.weight, batch.last)
