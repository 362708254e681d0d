"""Linear: warm up linearly, then fall in a straight line to the end of the run.

Paper     the schedule of BERT (Devlin et al. 2019); the best simple one at a fixed budget in Bergsma et al. 2025,
          Straight to Zero (arXiv 2502.15938).
Promise   fully decayed when the run ends.
"""

from dataclasses import dataclass

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import ScaleBySchedule
from thrifty.techniques.schedules._warmup import warmed_up


@dataclass(frozen=True)
class LinearDecay(Technique):
    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT
    claims = frozenset({Claim.SCHEDULE})

    warmup: StepOrFraction = 0.05
    until: StepOrFraction = 1.0
    floor: float = 0.0

    def update(self, transform: GradientTransform) -> GradientTransform:
        factor = warmed_up(int(self.warmup), int(self.until), lambda progress: 1 - (1 - self.floor) * progress)
        return chain(ScaleBySchedule(factor), transform)
