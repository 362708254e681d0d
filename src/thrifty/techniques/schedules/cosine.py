"""Cosine decay (Loshchilov and Hutter 2017): warm up linearly, then decay along half a cosine.

Paper       Loshchilov and Hutter 2017, SGDR (arXiv 1608.03983). The warm-up is from Goyal et al. 2017 (arXiv
            1706.02677).
Promise     The learning rate is fully decayed at the end of the run. Fair comparisons at a budget require this (Kaddour
            et al. 2023, arXiv 2307.06440).
Use         optimizer = thrifty.apply(optimizer, "cosine", warmup=0.05, total_steps=10_000)
Start with  `cosine:warmup=0.05`. `floor=0.1` ends the run at a tenth of the peak rate.
Cost        None.
Avoid       Runs of unknown length, because a new length changes every rate after the warm-up.
Does not    Restart, unlike SGDR.
"""

import math

from thrifty.core.run_relative_settings import MovingMoment
from thrifty.techniques.schedules._warmup import ScheduleTechnique, warmed_up


def cosine(progress: float, floor: float = 0.0) -> float:
    """Return the learning-rate factor at `progress` (from 0 to 1): 1 at the start of the decay, `floor` at the end."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class CosineDecay(ScheduleTechnique):
    warmup: MovingMoment = 0.05
    until: MovingMoment = 1.0
    """End of the decay. Afterwards the factor stays at `floor`."""
    floor: float = 0.0
    """Final rate, as a fraction of the peak rate."""

    def factor(self, step: int) -> float:
        return warmed_up(step, int(self.warmup), int(self.until), lambda progress: cosine(progress, self.floor))
