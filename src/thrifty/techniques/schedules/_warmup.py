"""What learning-rate schedules share: a linear warm-up, then a shape over the rest."""

from collections.abc import Callable


def warmed_up(warmup: int, until: int, shape: Callable[[float], float]) -> Callable[[int], float]:
    """The factor before each update: (step + 1) / warmup, then shape(progress) with progress going from 0 to 1.

    The first update already has a positive rate, the last one a rate just above the shape's end.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return shape(min((step - warmup) / max(until - warmup, 1), 1.0))

    return factor
