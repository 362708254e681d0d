"""Rotary positions stretched for long contexts, as Llama 3.1 and later do (Grattafiori et al. 2024, arXiv 2407.21783).

Channels that turn many times within the original context keep their frequency, those that turn less than about once
are slowed by `factor`, and the ones between are blended.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """`low` and `high` count turns within `original` tokens, the context the model was first trained at."""

    factor: float
    low: float
    high: float
    original: int

    def slowed(self, frequencies: Tensor) -> Tensor:
        """The frequencies (k/2,) of the stretched model from those of the original one."""
        turns = self.original * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)
