"""Visibility rules between tokens, by position and by text."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VisibilityRule:
    """Rule that defines visible pairs of positions. By default each token sees all tokens."""

    causal: bool = False
    window: int = 0
    """Number of tokens that a token sees backward (including itself) and, if not causal, also forward; 0 for no limit.
    """
    first: int = 0
    """Number of first tokens that the window does not limit: all tokens see the first tokens, which see all tokens."""

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return True where tokens at positions `queries` see tokens at positions `keys` (int64, broadcast)."""
        seen = keys >= 0
        if self.window:
            near = (queries - keys < self.window) & (keys - queries < self.window)
            seen = near | (keys < self.first) | (queries < self.first)
        return seen & (keys <= queries) if self.causal else seen

    def visible_blocks(self, queries: Tensor, keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return two masks for pairs of blocks with these indices (broadcast): True if any token pair is visible, and
        True if every token pair is visible.
        """
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
    """Return a mask (n, q, s), True where positions `queries` (n, q) and `keys` (n, s) belong to the same text.

    `segments` (n, t) contains the text id of each token.
    """
    return segments.gather(1, queries)[:, :, None] == segments.gather(1, keys)[:, None, :]
