"""Cosine: warm up linearly, then fall along half a cosine to the end of the run.

Paper     Loshchilov & Hutter 2017, SGDR (arXiv 1608.03983); warm-up after Goyal et al. 2017 (arXiv 1706.02677).
Promise   a rate that is fully decayed when the run ends, which is what makes comparisons at a budget fair
          (Kaddour et al. 2023, No Train No Gain, arXiv 2307.06440).
"""

import math
from dataclasses import dataclass

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import ScaleBySchedule
from thrifty.techniques.schedules._warmup import warmed_up


def cosine(progress: float, floor: float = 0.0) -> float:
    """The factor at `progress` in [0, 1] of the decay: 1 at its start, `floor` at its end."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class CosineDecay(Technique):
    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT
    claims = frozenset({Claim.SCHEDULE})

    warmup: StepOrFraction = 0.05
    until: StepOrFraction = 1.0
    """When the decay is over; the factor stays at `floor` afterwards."""
    floor: float = 0.0
    """Smallest factor, as a fraction of the peak rate."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        factor = warmed_up(int(self.warmup), int(self.until), lambda progress: cosine(progress, self.floor))
        return chain(ScaleBySchedule(factor), transform)
