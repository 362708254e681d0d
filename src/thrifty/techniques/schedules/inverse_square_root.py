"""Inverse square root: warm up linearly, fall as 1/sqrt(step), then straight to zero at the end.

Paper     Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762), section 5.3, scaled to peak at the end of
          the warm-up; the final cooldown after Zhai et al. 2022, Scaling Vision Transformers (arXiv 2106.04560).
Promise   a run that may be prolonged: everything before `cooldown` does not depend on the length of the run.
"""

from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.techniques.schedules._warmup import ScheduleTechnique


def inverse_square_root(step: int, warmup: int, cooldown: int, until: int) -> float:
    """The factor before update `step`: linear warm-up, sqrt(warmup / step), then linear from `cooldown` to 0 at
    `until`."""
    warmup = max(warmup, 1)
    factor = min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
    if step >= cooldown:
        factor *= max(until - step, 0) / max(until - cooldown, 1)
    return factor


class InverseSquareRoot(ScheduleTechnique):
    warmup: StepOrFraction = 0.05
    cooldown: StepOrFraction = 0.8
    until: StepOrFraction = 1.0

    def factor(self, step: int) -> float:
        return inverse_square_root(step, int(self.warmup), int(self.cooldown), int(self.until))
