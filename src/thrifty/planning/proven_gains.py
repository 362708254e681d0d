"""Proven gains: techniques that change the result of training, and that a comparison found better.

The comparison measured the steps to equal loss. The plan measures the time of a step on this machine. Their product is
the expected time to equal loss, so a technique is only chosen if its steps are fast enough on this machine."""

from collections.abc import Iterable
from dataclasses import dataclass

from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.search_space import PlanOption

AXIS = "proven gains"
FLOAT32 = 4
"""Bytes of a parameter."""
MOST_GAINS = 2
"""Maximum number of proven gains for whose probes a search keeps time."""
SIMILAR_SIZE = 10.0
"""Maximum ratio of the parameters of the recipe's model and of the compared model."""


@dataclass(frozen=True)
class ProvenGain:
    """A technique, and the steps that it needs to the baseline's final loss, relative to the baseline's steps."""

    option: PlanOption
    relative_steps: float
    parameters: int
    """Number of parameters of the compared model."""
    pairs: int
    """Number of paired runs of the comparison."""

    def is_similar(self, parameters: float) -> bool:
        return 1 / SIMILAR_SIZE <= self.parameters / max(parameters, 1.0) <= SIMILAR_SIZE


def add_proven_gains(search: PlanSearch, chosen: PlanCandidate, gains: Iterable[ProvenGain]) -> PlanCandidate:
    """Return `chosen` with each technique that lowers its expected time to equal loss and fits."""
    for gain in gains:
        replaced = {name for option in chosen.options for name in option.drops}
        if replaced & gain.option.drops or not gain.is_similar(search.plainest.parameters / FLOAT32):
            continue
        extended = search.try_in_addition(chosen, gain.option)
        if extended and search.seconds(extended) * gain.relative_steps < search.seconds(chosen):
            chosen = extended
    return chosen
