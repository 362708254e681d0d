"""EMA (Polyak and Juditsky 1992): evaluate and export an exponential moving average of weights.

Paper       Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging. Morales-Brotons et al.
            2024, Exponential Moving Average of Weights (arXiv 2411.18704), describes the exponential form.
Promise     The average smooths the noise of about the last 1 / (1 - decay) steps. Training itself is unchanged.
Use         optimizer = thrifty.apply(optimizer, "ema", decay=0.999)
            with optimizer.use_eval_weights():
                held_out_loss = model(**next(iter(loader))).loss
Start with  `ema:decay=0.999`. Use a smaller decay for runs of less than a few thousand steps.
Cost        One float32 copy of the parameters, and one pass over this copy per step.
Avoid       Learning rates that decay to zero, because they leave little noise to average.
Does not    Average buffers, or weights before `start`.
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
    """The trainer evaluates and exports the average of the weights. The trained weights are also evaluated
    ("trained_loss"), and `thrifty export --raw-weights` exports them.

    The average starts as a copy of the weights. Then `ramp` selects a decay that warms up as (1 + t) / (10 + t) after t
    updates, or the bias correction of Adam.
    """

    stage, numerics = Stage.AVERAGE, Numerics.DIFFERENT
    claims = frozenset({Claim.AVERAGED_WEIGHTS})

    decay: Annotated[float, SettingBound(least=0, most=0.999999)] = 0.999
    """Factor of the old average in each update, after the warmup."""
    ramp: Beginning = "warmup"
    """Early averages: a decay that warms up, or the bias correction of Adam."""
    start: StepOrFraction = 0
    """First step whose weights are averaged."""
    evaluate: bool = True
    """Evaluate and export the average. If false, only checkpoints store the average."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(EmaTransform(self.decay, self.ramp, int(self.start), self.evaluate), transform)
