"""Inverse square root (Vaswani et al. 2017): decay the learning rate as 1/sqrt(step), then to zero.

Paper       Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762), section 5.3. The final cooldown is from
            Zhai et al. 2022, Scaling Vision Transformers (arXiv 2106.04560).
Promise     A run can be prolonged, because learning rates before `cooldown` depend only on the warm-up and not on the
            run's length.
Use         optimizer = thrifty.apply(optimizer, "inverse_square_root", warmup=500, total_steps=10_000)
Start with  `inverse_square_root:warmup=500,cooldown=0.8`. If `warmup` is in steps, a prolonged run keeps its rates.
Cost        None.
Avoid       A fixed budget: use linear or cosine decay.
Does not    Follow the paper's absolute scale; the rate at the end of the warm-up is the optimizer's learning rate.
"""

from thrifty.core.run_relative_settings import MovingMoment
from thrifty.techniques.schedules._warmup import ScheduleTechnique


def inverse_square_root(step: int, warmup: int, cooldown: int, until: int) -> float:
    """Return the learning-rate factor of update `step`: linear warm-up, then sqrt(warmup / step), at the end linear to
    0.

    The final linear decay begins at step `cooldown` and ends at step `until`.
    """
    warmup = max(warmup, 1)
    factor = min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
    if step >= cooldown:
        factor *= max(until - step, 0) / max(until - cooldown, 1)
    return factor


class InverseSquareRoot(ScheduleTechnique):
    warmup: MovingMoment = 0.05
    cooldown: MovingMoment = 0.8
    until: MovingMoment = 1.0

    def factor(self, step: int) -> float:
        return inverse_square_root(step, int(self.warmup), int(self.cooldown), int(self.until))
