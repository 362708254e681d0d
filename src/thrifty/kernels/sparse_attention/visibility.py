"""Rules of visibility between tokens, by their positions and by their text."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VisibilityRule:
    """The rule by which pairs of positions are visible; by default each token sees all others."""

    causal: bool = False
    window: int = 0
    """Number of tokens, itself included, that a token sees backward, and if not causal also forward; 0 is no limit."""
    first: int = 0
    """Number of first tokens of a row outside the window's limit: all tokens see them, and they see all."""

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return True where tokens at `queries` see keys at `keys` (int64 positions, broadcast)."""
        seen = keys >= 0
        if self.window:
            near = (queries - keys < self.window) & (keys - queries < self.window)
            seen = near | (keys < self.first) | (queries < self.first)
        return seen & (keys <= queries) if self.causal else seen

    def visible_blocks(self, queries: Tensor, keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return whether some pair, and whether every pair, of two blocks with these indices (broadcast) is visible."""
        q, k = queries * block, keys * block
        some, all_ = keys >= 0, keys >= 0
        if self.window:
            last = block - 1
            away_least = ((q - k).abs() - last).clamp(min=0)
            is_first = (k < self.first) | (q < self.first)
            all_first = (k + last < self.first) | (q + last < self.first)
            some = (away_least < self.window) | is_first
            all_ = ((q - k).abs() + last < self.window) | all_first
        if self.causal:
            some, all_ = some & (keys <= queries), all_ & (keys < queries)
        return some, all_


def same_text(segments: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether positions (n, q) and (n, s) belong to the same text: (n, q, s).

    `segments` (n, t) has the id of each token's text.
    """
    return segments.gather(1, queries)[:, :, None] == segments.gather(1, keys)[:, None, :]
