"""Speed ratio of two designs at equal peak, as a product of factors.

Papers scale an accelerator to about the peak of a processor and print one ratio. That ratio is the reduction of
operations, times the utilisation of one design, over the utilisation of the other."""

from dataclasses import dataclass

from thrifty.simulators.accelerator.simulation_result import SimulationResult


@dataclass(frozen=True)
class IsoPeak:
    """Factors of one design's speed over another's, at equal multiplications per second."""

    omitted: float
    """Operations of the other design over the operations of this one."""
    utilisation: float
    """Fraction of this design's multipliers in use."""
    other_utilisation: float

    @property
    def ratio(self) -> float:
        """Speed over the other design's."""
        return self.omitted * self.utilisation / self.other_utilisation


def iso_peak(result: SimulationResult, other: SimulationResult) -> IsoPeak:
    """Return the factors of the speed ratio at equal peak. They are exact for the two simulated results."""
    own, others = (sum(layer.macs for layer in each.layers) for each in (result, other))
    return IsoPeak(others / own, result.utilisation, other.utilisation)
