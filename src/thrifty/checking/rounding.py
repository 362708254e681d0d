"""Whether two runs differ by no more than rounding: in the first loss, in its gradients, and in later losses.

An optimizer may make a last bit a larger one. How far later losses may be off is therefore asked of the run itself,
where they are off by more than usual: as far as it goes when nothing but the last bits of its gradients change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thrifty.checking.observed_runs import CheckSubject, StepObservations, farthest, relative, train_observed
from thrifty.core.technique import Technique

GRADIENTS = 30
"""A gradient may be so many times as far off, as a share of itself, as the loss."""
LATER = 30
"""So may the losses of later steps, ..."""
NUDGES, SPREAD = 3, 4
"""... or so many times as far as the farthest of so many runs whose gradients differ in their last bits."""
IN_16_BITS = 2e-2
"""What rounding may come to, as a share of the loss, in a run that computes in 16 bits or less."""
MOST = 0.25
"""No gradient may be farther off than this, whatever was promised: a factor of two must show."""


@dataclass(frozen=True)
class RoundingComparison:
    within: bool
    text: str
    """How far off what is, and how far it may be."""
    whose: str
    """The parameter whose gradient is farthest off."""
    gradient_within: bool


def compare_rounding(
    losses: Sequence[float],
    gradients: Mapping[str, Tensor],
    wanted: StepObservations,
    tolerance: float,
    sensitivity: Callable[[], float],
) -> RoundingComparison:
    """Hold the losses of some steps and the gradients of the first against those of a run, within a tolerance as a
    share of the loss. `sensitivity` is asked how far later losses go by themselves, see `loss_sensitivity`."""
    first, later = relative(losses[0], wanted.losses[0]), _later(losses, wanted)
    gradient, whose = farthest(dict(gradients), wanted.first)
    most, most_later = min(GRADIENTS * tolerance, MOST), LATER * tolerance
    by_itself = ""
    if first <= tolerance and gradient <= most and later > most_later:
        measured = sensitivity()
        most_later = max(most_later, SPREAD * measured)
        by_itself = f"; by {measured:.1e} where the last bits of gradients change"
    text = (
        f"off by {first:.1e} of the first loss ({tolerance:g} allowed), {gradient:.1e} of a gradient "
        f"({most:g} allowed), {later:.1e} of a later loss ({most_later:.2g} allowed{by_itself})"
    )
    within = first <= tolerance and gradient <= most and later <= most_later
    return RoundingComparison(within, text, whose, gradient <= most)


def loss_sensitivity(
    subject: CheckSubject, techniques: Sequence[Technique], wanted: StepObservations, quiet: bool
) -> float:
    """How far the losses of these techniques' run come to be off when the last bits of its gradients change."""
    nudged = (train_observed(subject, techniques, quiet=quiet, nudge=seed)[1] for seed in range(NUDGES))
    return max(_later(trace.losses, wanted) for trace in nudged)


def _later(losses: Sequence[float], wanted: StepObservations) -> float:
    return max(relative(mine, theirs) for mine, theirs in zip(losses, wanted.losses, strict=True))
