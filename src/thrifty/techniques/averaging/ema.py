"""EMA: an exponential moving average of the weights is evaluated and exported, the weights train on.

Paper     Polyak & Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; the exponential form and its
          habits in Morales-Brotons et al. 2024, Exponential Moving Average of Weights (arXiv 2411.18704).
Promise   the noise of the last few 1 / (1 - decay) steps averaged away. Evaluated and exported is the mean; the weights
          in training are those of the plain run, measured beside it ("trained_loss") and exported by
          `thrifty export --raw-weights`.
Cost      one copy of the parameters in float32, and a pass over them at each step.
Avoid     with a rate that is decayed to zero: little noise is left to average.
Note      nothing of the weights before `start` is in it: the first weights are copied, and then either the decay warms
          up as (1 + t) / (10 + t), or the mean is that of Adam's bias correction. Buffers are not averaged.
"""

from typing import Annotated

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.weight_average import Beginning, EmaTransform


class ExponentialMovingAverage(Technique):
    stage, numerics = Stage.AVERAGE, Numerics.DIFFERENT
    claims = frozenset({Claim.AVERAGED_WEIGHTS})

    decay: Annotated[float, SettingBound(least=0, most=0.999999)] = 0.999
    """How much of the mean each step keeps, in the long run."""
    ramp: Beginning = "warmup"
    start: StepOrFraction = 0
    """The first step whose weights are averaged."""
    evaluate: bool = True
    """Whether the mean is what is evaluated and exported; otherwise it is only kept in the checkpoints."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(EmaTransform(self.decay, self.ramp, int(self.start), self.evaluate), transform)
