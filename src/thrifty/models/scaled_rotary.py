"""Rotary positions stretched for long contexts, as Llama 3.1 and later do (Grattafiori et al. 2024, arXiv 2407.21783).

Channels that turn many times within the original context keep their frequency, those that turn less than about once
are slowed by `factor`, and the ones between are blended.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thrifty.models.transformer import Rotary


@dataclass(frozen=True)
class Llama3Scaling:
    """`low` and `high` count turns within `original` tokens, the context the model was first trained at."""

    factor: float
    low: float
    high: float
    original: int


class ScaledRotary(Rotary):
    def __init__(self, head_width: int, base: float, scaling: Llama3Scaling):
        super().__init__(head_width, base)
        self.scaling = scaling

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self.head_width, 2, device=device, dtype=torch.float32) / self.head_width
        frequency = self.base**-exponent
        rule = self.scaling
        turns = rule.original * frequency / (2 * math.pi)
        kept = ((turns - rule.low) / (rule.high - rule.low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / rule.factor)
        angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
        return angle.cos(), angle.sin()
