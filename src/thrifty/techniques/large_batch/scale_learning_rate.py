"""Scaled learning rate: a rate found at one batch size carried over to another, reached gradually.

Paper     Goyal et al. 2017, Accurate, Large Minibatch SGD (arXiv 1706.02677): the linear rule, the gradual warm-up;
          Malladi et al. 2022 (arXiv 2205.10287): the square root for Adam, first in Krizhevsky 2014 (arXiv 1404.5997).
Promise   a batch k times as large takes k times (linear) or sqrt(k) times (square root) the rate of the base batch. The
          warm-up begins at the base rate, not at zero: it is 1 before the first update and grows by equal amounts.
Avoid     far above the gradient noise scale (measure.noise_scale): there no rate makes up for the lost steps.
Note      square_root for Adam and its relatives, linear for SGD. A schedule that warms up from zero multiplies with
          this; set its warmup to 0 to have the paper's. The paper's momentum correction is for momenta that hold the
          rate inside; ours do not. With a batch ramp the factor is that of the
          recipe's batch; set `batch` where the ramp ends at another.
"""

from typing import Literal

from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.run_relative_settings import EffectiveBatch, StepOrFraction
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import ScaleBySchedule

Rule = Literal["square_root", "linear"]


def scaled_rate(batch: int, base_batch: int, rule: Rule) -> float:
    """By what a rate that is right for `base_batch` examples a step is multiplied for `batch` examples."""
    times = batch / base_batch
    return times if rule == "linear" else times**0.5


def warmed_up_from_base(step: int, factor: float, warmup: int) -> float:
    """The factor before update `step`: 1 at step 0, `factor` from step `warmup` on, linear in between. A factor below 1
    holds from the start: a rate that is too high is nothing to begin with."""
    if factor <= 1 or step >= warmup:
        return factor
    return 1 + (factor - 1) * step / warmup


class ScaleLearningRate(Technique):
    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT

    base_batch: Positive = 32
    """Examples per step for which the optimizer's rate was chosen."""
    rule: Rule = "square_root"
    warmup: StepOrFraction = 0.05
    batch: EffectiveBatch = 0
    """Examples per step of this run; 0 for its own effective batch."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        factor, warmup = scaled_rate(self.batch, self.base_batch, self.rule), int(self.warmup)
        return chain(ScaleBySchedule(lambda step: warmed_up_from_base(step, factor, warmup)), transform)
