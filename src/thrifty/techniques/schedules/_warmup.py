"""Common parts of learning-rate schedules: the base class and the linear warm-up."""

from collections.abc import Callable

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import ScaleBySchedule


class ScheduleTechnique(Technique):
    """A technique that multiplies each update by a step-dependent factor."""

    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT
    claims = frozenset({Claim.SCHEDULE})

    def factor(self, step: int) -> float:
        """Return the learning-rate factor of update `step`, counted from 0."""
        raise NotImplementedError

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(ScaleBySchedule(self.factor), transform)


def warmed_up(step: int, warmup: int, until: int, shape: Callable[[float], float]) -> float:
    """Return the learning-rate factor of a step: (step + 1) / warmup in the warm-up, then shape(progress).

    After the warm-up, progress rises from 0 to 1. The rate of the first update is positive. The rate of the last update
    is just above shape(1).
    """
    if step < warmup:
        return (step + 1) / warmup
    return shape(min((step - warmup) / max(until - warmup, 1), 1.0))
