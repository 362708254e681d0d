"""Rotary positions scaled for long contexts, as in Llama 3.1 and later (Grattafiori et al. 2024, arXiv 2407.21783).

Channels with at least `high` rotations within the original context keep their frequency. Channels with at most `low`
rotations are slowed by `factor`. Between the two, frequencies are interpolated.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Settings of the scaling; `low` and `high` count rotations within `original` tokens, the original training
    context."""

    factor: float
    low: float
    high: float
    original: int

    def slowed(self, frequencies: Tensor) -> Tensor:
        """Scale the rotary frequencies (k/2,) of a head of width k."""
        turns = self.original * frequencies / (2 * math.pi)
        unscaled_fraction = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (unscaled_fraction + (1 - unscaled_fraction) / self.factor)
