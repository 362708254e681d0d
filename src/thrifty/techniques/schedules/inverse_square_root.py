"""Inverse square root (Vaswani et al. 2017): decay the learning rate as 1/sqrt(step), then to zero.

Paper       Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762), section 5.3; final cooldown of Zhai et
            al. 2022, Scaling Vision Transformers (arXiv 2106.04560).
Promise     A run can be prolonged: rates before `cooldown` depend only on the warm-up, not on the length of the run.
Use         optimizer = thrifty.apply(optimizer, "inverse_square_root", warmup=500, total_steps=10_000)
Start with  `inverse_square_root:warmup=500,cooldown=0.8`. A warm-up in steps keeps the rates when the run is prolonged.
Cost        None.
Avoid       A fixed budget: linear and cosine decay are made for it.
Does not    Follow the paper's absolute scale: the factor peaks at 1 at the end of the warm-up.
"""

from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.techniques.schedules._warmup import ScheduleTechnique


def inverse_square_root(step: int, warmup: int, cooldown: int, until: int) -> float:
    """Return the factor before update `step`: linear warm-up, sqrt(warmup / step), then linear to 0.

    The last part begins at `cooldown` and ends at `until`.
    """
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
