"""Learning rate scaling (Goyal et al. 2017): transfer a tuned learning rate to another batch size.

Paper       Goyal et al. 2017 (arXiv 1706.02677) for the linear rule and the gradual warm-up. The square-root rule is
            from Krizhevsky 2014 (arXiv 1404.5997), and for Adam from Malladi et al. 2022 (arXiv 2205.10287).
Promise     For a batch k times as large, the learning rate is multiplied by k (linear) or by sqrt(k) (square root).
            Warm-up starts at the unscaled rate.
Use         optimizer = thrifty.apply(optimizer, "scale_learning_rate", base_batch=32, batch=256, total_steps=10_000)
Start with  `scale_learning_rate:base_batch=32,rule=square_root` for Adam and its variants, and `rule=linear` for SGD.
            For the paper's warm-up, set the schedule's `warmup` to 0.
Cost        None.
Avoid       Batches far above the gradient noise scale (measure.noise_scale), because no learning rate compensates for
            the smaller number of steps.
Does not    Replace a schedule; the factor multiplies the schedule's learning rate.
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
    """Return the factor of the learning rate if the examples per step change from `base_batch` to `batch`."""
    ratio = batch / base_batch
    return ratio if rule == "linear" else ratio**0.5


def warmed_up_from_base(step: int, factor: float, warmup: int) -> float:
    """Return the learning-rate factor at `step`: linear from 1 at step 0 to `factor` at step `warmup`, then constant.

    A factor below 1 applies from step 0, because a higher rate could diverge.
    """
    if factor <= 1 or step >= warmup:
        return factor
    return 1 + (factor - 1) * step / warmup


class ScaleLearningRate(Technique):
    """The factor of the learning rate is 1 at the first update and grows linearly to its final value. A factor below 1
    applies from the first update. Differs from the paper: there is no momentum correction, because here the learning
    rate multiplies the momentum. With a batch ramp, the factor is computed for the recipe's batch. Set `batch` if the
    ramp ends at a batch other than the recipe's."""

    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT

    base_batch: Positive = 32
    """Number of examples per step for which the learning rate was tuned."""
    rule: Rule = "square_root"
    warmup: StepOrFraction = 0.05
    batch: EffectiveBatch = 0
    """Number of examples per step in this run; 0 is the run's effective batch."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        factor, warmup = scaled_rate(self.batch, self.base_batch, self.rule), int(self.warmup)
        return chain(ScaleBySchedule(lambda step: warmed_up_from_base(step, factor, warmup)), transform)
