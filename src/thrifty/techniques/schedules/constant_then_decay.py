"""Constant then decay (Hu et al. 2024): hold the peak learning rate, then decay linearly to zero.

Paper       Hu et al. 2024, MiniCPM (arXiv 2404.06395), which calls the schedule "warmup-stable-decay". Also Hägele et
            al. 2024 (arXiv 2405.18392).
Promise     One constant phase serves runs of several lengths. The learning rate is zero at the end of the run.
Use         optimizer = thrifty.apply(optimizer, "constant_then_decay", decay_from=0.8, total_steps=10_000)
Start with  `constant_then_decay:warmup=0.05,decay_from=0.8`. To prolong a run, fork it at a step before `decay_from`.
Cost        None.
Avoid       Stopping before the decay, because the loss is lower after the decay.
Does not    Restart or repeat the schedule.
"""

from thrifty.core.run_relative_settings import MovingMoment
from thrifty.techniques.schedules._warmup import ScheduleTechnique


def constant_then_decay(step: int, warmup: int, decay_from: int, until: int) -> float:
    """Return the learning-rate factor of update `step`: linear warm-up, then 1, then linear decay.

    The decay begins at step `decay_from` and reaches 0 at step `until`.
    """
    if step < warmup:
        return (step + 1) / warmup
    if step < decay_from:
        return 1.0
    return max(until - step, 0) / max(until - decay_from, 1)


class ConstantThenDecay(ScheduleTechnique):
    warmup: MovingMoment = 0.05
    decay_from: MovingMoment = 0.8
    until: MovingMoment = 1.0

    def factor(self, step: int) -> float:
        return constant_then_decay(step, int(self.warmup), int(self.decay_from), int(self.until))
