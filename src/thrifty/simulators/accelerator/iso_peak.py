"""Why one design is faster than another at equal peak, in factors that multiply up to the ratio.

Papers scale an accelerator to about the peak of a processor and print one ratio. It is fewer operations, times what
share of its multipliers the one keeps busy, over what share the other does.
"""

from dataclasses import dataclass

from thrifty.simulators.accelerator.simulation_result import SimulationResult


@dataclass(frozen=True)
class IsoPeak:
    """Of a design over another, both as if they had as many multiplications a second."""

    omitted: float
    """Operations of the other over its own."""
    utilisation: float
    """Its share of multipliers at work."""
    other_utilisation: float

    @property
    def ratio(self) -> float:
        """How many times faster it is."""
        return self.omitted * self.utilisation / self.other_utilisation


def iso_peak(result: SimulationResult, other: SimulationResult) -> IsoPeak:
    """The ratio of times at equal peak, and what it is made of. Exact for the two results as simulated."""
    own, others = (sum(layer.macs for layer in each.layers) for each in (result, other))
    return IsoPeak(others / own, result.utilisation, other.utilisation)
