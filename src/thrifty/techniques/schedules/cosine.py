"""Cosine: warm up linearly, then fall along half a cosine to the end of the run.

Paper     Loshchilov & Hutter 2017, SGDR (arXiv 1608.03983); warm-up after Goyal et al. 2017 (arXiv 1706.02677).
Promise   a rate that is fully decayed when the run ends, which is what makes comparisons at a budget fair
          (Kaddour et al. 2023, No Train No Gain, arXiv 2307.06440).
"""

import math

from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.techniques.schedules._warmup import ScheduleTechnique, warmed_up


def cosine(progress: float, floor: float = 0.0) -> float:
    """The factor at `progress` in [0, 1] of the decay: 1 at its start, `floor` at its end."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class CosineDecay(ScheduleTechnique):
    warmup: StepOrFraction = 0.05
    until: StepOrFraction = 1.0
    """When the decay is over; the factor stays at `floor` afterwards."""
    floor: float = 0.0
    """Smallest factor, as a fraction of the peak rate."""

    def factor(self, step: int) -> float:
        return warmed_up(step, int(self.warmup), int(self.until), lambda progress: cosine(progress, self.floor))
