"""Linear decay (Devlin et al. 2019): warm up linearly, then decay in a straight line.

Paper       Devlin et al. 2019, BERT (arXiv 1810.04805). Bergsma et al. 2025, Straight to Zero (arXiv 2502.15938), find
            it the best simple schedule at a fixed budget.
Promise     The learning rate is fully decayed at the end of the run.
Use         optimizer = thrifty.apply(optimizer, "linear", warmup=0.05, total_steps=10_000)
Start with  `linear:warmup=0.05`.
Cost        None.
Avoid       Runs of unknown length, because a new length changes every rate after the warm-up.
Does not    Restart or hold the peak rate.
"""

from thrifty.core.run_relative_settings import MovingMoment
from thrifty.techniques.schedules._warmup import ScheduleTechnique, warmed_up


class LinearDecay(ScheduleTechnique):
    warmup: MovingMoment = 0.05
    until: MovingMoment = 1.0
    floor: float = 0.0

    def factor(self, step: int) -> float:
        return warmed_up(step, int(self.warmup), int(self.until), lambda progress: 1 - (1 - self.floor) * progress)
