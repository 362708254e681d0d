"""What tokens may see of each other by their places alone, and by the text that they belong to."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VisibilityRule:
    """The rule by which pairs of places are visible; one token sees all others unless something is said."""

    causal: bool = False
    window: int = 0
    """A token sees so many tokens up to itself, and as many from itself on where it may look ahead; 0 is no limit."""
    first: int = 0
    """The first tokens of a row are outside of the window's limit: all see them, and they see all."""

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether tokens at these places (int64, to be broadcast) see keys at those."""
        seen = keys >= 0
        if self.window:
            near = (queries - keys < self.window) & (keys - queries < self.window)
            seen = near | (keys < self.first) | (queries < self.first)
        return seen & (keys <= queries) if self.causal else seen

    def visible_blocks(self, queries: Tensor, keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Of blocks of so many places with these numbers (to be broadcast): whether some pair is visible, and whether
        all are."""
        q, k = queries * block, keys * block
        some, all_ = keys >= 0, keys >= 0
        if self.window:
            last = block - 1
            away_least = ((q - k).abs() - last).clamp(min=0)
            of_first = (k < self.first) | (q < self.first)
            wholly_first = (k + last < self.first) | (q + last < self.first)
            some = (away_least < self.window) | of_first
            all_ = ((q - k).abs() + last < self.window) | wholly_first
        if self.causal:
            some, all_ = some & (keys <= queries), all_ & (keys < queries)
        return some, all_


def same_text(segments: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether places (n, q) and (n, s) of rows of `segments` (n, t), the number of each token's text, are of one text:
    (n, q, s)."""
    return segments.gather(1, queries)[:, :, None] == segments.gather(1, keys)[:, None, :]
