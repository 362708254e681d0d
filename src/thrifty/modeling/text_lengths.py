"""Texts that are shorter in some steps than in others."""

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


def truncate_texts(batch: Batch, length: int) -> Batch:
    """The first `length` tokens of each text, and the one behind them, which the last of them predicts."""
    return Batch({**batch.fields, "tokens": batch["tokens"][:, : length + 1]}, batch.weight, batch.last)
