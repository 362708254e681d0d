"""Linear: warm up linearly, then fall in a straight line to the end of the run.

Paper     the schedule of BERT (Devlin et al. 2019); the best simple one at a fixed budget in Bergsma et al. 2025,
          Straight to Zero (arXiv 2502.15938).
Promise   fully decayed when the run ends.
"""

from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.techniques.schedules._warmup import ScheduleTechnique, warmed_up


class LinearDecay(ScheduleTechnique):
    warmup: StepOrFraction = 0.05
    until: StepOrFraction = 1.0
    floor: float = 0.0

    def factor(self, step: int) -> float:
        return warmed_up(step, int(self.warmup), int(self.until), lambda progress: 1 - (1 - self.floor) * progress)
