"""Comparison of two runs up to rounding: the first loss, its gradients, and later losses.

Some optimizers amplify last-bit differences of gradients. If later losses differ by more than usual, the reference run
is repeated with random last-bit changes of gradients. The deviation of these runs then sets the limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thrifty.checking.observed_runs import CheckSubject, StepObservations, farthest, relative, train_observed
from thrifty.core.technique import Technique

GRADIENTS = 30
"""Maximum relative error of a gradient, as a multiple of the tolerance for the loss."""
LATER = 30
"""Maximum relative error of later losses, as a multiple of the tolerance for the first loss."""
NUDGES, SPREAD = 3, 4
"""Number of runs with changed last bits of gradients, and maximum error of later losses as a multiple of the largest
deviation of these runs.
"""
IN_16_BITS = 2e-2
"""Relative tolerance for the loss of a run that computes in 16 bits or less."""
MOST = 0.25
"""Maximum relative error of a gradient for any tolerance, so that an error by a factor of two is always detected."""


@dataclass(frozen=True)
class RoundingComparison:
    within: bool
    text: str
    """Measured errors and their limits."""
    whose: str
    """Name of the parameter whose gradient has the largest relative error."""
    gradient_within: bool


def compare_rounding(
    losses: Sequence[float],
    gradients: Mapping[str, Tensor],
    wanted: StepObservations,
    tolerance: float,
    sensitivity: Callable[[], float],
) -> RoundingComparison:
    """Compare the losses of several steps, and the first step's gradients, with a reference run. `tolerance` is
    relative to the loss. `sensitivity` returns the value of `loss_sensitivity`; it is called only if the value is
    required.
    """
    first, later = relative(losses[0], wanted.losses[0]), _later(losses, wanted)
    gradient, whose = farthest(dict(gradients), wanted.first)
    most, most_later = min(GRADIENTS * tolerance, MOST), LATER * tolerance
    by_sensitivity = ""
    if first <= tolerance and gradient <= most and later > most_later:
        measured = sensitivity()
        most_later = max(most_later, SPREAD * measured)
        by_sensitivity = f"; by {measured:.1e} where the last bits of gradients change"
    text = (
        f"off by {first:.1e} of the first loss ({tolerance:g} allowed), {gradient:.1e} of a gradient "
        f"({most:g} allowed), {later:.1e} of a later loss ({most_later:.2g} allowed{by_sensitivity})"
    )
    within = first <= tolerance and gradient <= most and later <= most_later
    return RoundingComparison(within, text, whose, gradient <= most)


def loss_sensitivity(
    subject: CheckSubject, techniques: Sequence[Technique], wanted: StepObservations, quiet: bool
) -> float:
    """Measure the largest relative change of a run's losses when the last bits of its gradients change."""
    nudged = (train_observed(subject, techniques, quiet=quiet, nudge=seed)[1] for seed in range(NUDGES))
    return max(_later(trace.losses, wanted) for trace in nudged)


def _later(losses: Sequence[float], wanted: StepObservations) -> float:
    return max(relative(mine, theirs) for mine, theirs in zip(losses, wanted.losses, strict=True))
