"""Proven gains: techniques that change the result of training, and that a comparison found better.

The comparison measured the steps to equal loss. The plan measures the time of a step on this machine. Their product is
the expected time to equal loss, so a technique is only chosen if its steps are fast enough on this machine. Without
probes, steps are expected to take as long as in the comparison."""

from collections.abc import Iterable
from dataclasses import dataclass

from thrifty.planning.search_space import PlanOption

AXIS = "proven gains"
FLOAT32 = 4
"""Bytes of a parameter."""
MOST_GAINS = 2
"""Maximum number of proven gains that a search considers."""
SIMILAR_SIZE = 10.0
"""Maximum ratio of the parameters of the recipe's model and of the compared model."""


@dataclass(frozen=True)
class ProvenGain:
    """A technique as an option of a plan, and the comparison that proved its gain."""

    option: PlanOption
    parameters: int
    """Number of parameters of the compared model."""
    pairs: int
    """Number of paired runs of the comparison."""
    step_time: float = 1.0
    """Step time in the comparison, relative to the baseline's."""

    @property
    def time(self) -> float:
        """Time to equal loss in the comparison, relative to the baseline's."""
        return self.option.relative_steps * self.step_time

    def is_similar(self, parameters: float) -> bool:
        return 1 / SIMILAR_SIZE <= self.parameters / max(parameters, 1.0) <= SIMILAR_SIZE


def options_with_gains(gains: Iterable[ProvenGain], weights: float) -> dict[str, list[PlanOption]]:
    """Return the axis of proven gains for a model with `weights` bytes of parameters, the largest gains first. Gains of
    models of another size are left out. A plan has at most one gain, because gains were not measured together."""
    similar: dict[str, PlanOption] = {}
    for gain in sorted(gains, key=lambda gain: gain.time):
        if gain.is_similar(weights / FLOAT32):
            similar.setdefault(gain.option.techniques[0].name, gain.option)
    return {AXIS: [*similar.values()][:MOST_GAINS]} if similar else {}
