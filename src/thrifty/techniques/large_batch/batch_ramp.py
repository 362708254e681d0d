"""Batch ramp (Smith et al. 2018): start with small effective batches and enlarge them during the run.

Paper       Smith et al. 2018 (arXiv 1711.00489). The linear ramp is from Brown et al. 2020, GPT-3 (arXiv 2005.14165),
            appendix B. McCandlish et al. 2018 (arXiv 1812.06162) explain why small batches suffice early in a run.
Promise     More updates from the same examples while the gradient has little noise. Examples keep the order of a run
            without the ramp, and no example is skipped or repeated.
Use         loader = torch.utils.data.DataLoader(texts, batch_size=64)
            loader = thrifty.apply(loader, "batch_ramp", total_steps=10_000)
Start with  `batch_ramp:start=0.125,until=0.3`. If a schedule would halve the learning rate, double the batch instead.
Cost        With `compile`, one compilation per batch size. To save compilations, double the batch, use a large
            `multiple`, or set compile:dynamic=true.
Avoid       A budget in steps, because early steps see fewer examples.
Does not    Change the learning rate.
"""

import math
from typing import Literal

from thrifty.core.batches import BatchSource
from thrifty.core.claims import Claim
from thrifty.core.run_relative_settings import EffectiveBatch, StepOrFraction
from thrifty.core.setting_bounds import Fraction, Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique

Shape = Literal["doubling", "linear"]


def size_at(step: int, start: float, full: int, until: int, multiple: int, shape: Shape) -> int:
    """Return the number of examples in the effective batch of a step. It grows from `start` to `full` over `until`
    steps.

    Sizes below `full` are multiples of `multiple`. With "doubling", each doubling takes the same number of steps. With
    "linear", each increase by `multiple` takes about the same number of steps.
    """
    if step >= until:
        return full
    first = min(max(round(start / multiple), 1) * multiple, full)
    if shape == "linear":
        return first + (full - first) * step // until // multiple * multiple
    doublings = math.ceil(math.log2(full / first))
    return min(first * 2 ** (doublings * step // until), full)


class BatchRamp(Technique):
    """The loss of each example has the weight 1 / (effective batch of the step). Differs from GPT-3: all phases have
    the same number of steps. GPT-3's phases are measured in tokens."""

    stage, numerics = Stage.RESIZE, Numerics.DIFFERENT
    claims = frozenset({Claim.BATCH_SIZE})

    start: Fraction = 0.125
    """First batch size, as a fraction of the full batch."""
    until: StepOrFraction = 0.3
    """First step with the full batch."""
    shape: Shape = "doubling"
    multiple: Positive = 8
    """Divisor of all batch sizes below the full batch. It must be a multiple of the number of ranks."""
    batch: EffectiveBatch = 0
    """Full batch; 0 is the run's effective batch."""

    def sizes(self, full: int) -> list[int]:
        """Return the sizes of all batches up to the first full batch."""
        until = int(self.until)
        return [size_at(step, self.start * full, full, until, self.multiple, self.shape) for step in range(until + 1)]

    def idle_in(self, steps: int) -> str:
        changes = not self.batch or min(self.sizes(self.batch)[:steps]) < self.batch
        return "" if changes else f"the batch is {self.batch} at every step"

    def batches(self, source: BatchSource) -> BatchSource:
        return source.with_batch_size(self.sizes(self.batch or source.batch))
