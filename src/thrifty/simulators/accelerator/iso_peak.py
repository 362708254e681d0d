"""Speed ratio of two designs at equal peak, as a product of factors.

Papers scale an accelerator to about the peak of a processor and print one speed ratio. This ratio is the reduction of
operations, times the accelerator's utilization, divided by the processor's utilization."""

from dataclasses import dataclass

from thrifty.simulators.accelerator.simulation_result import SimulationResult


@dataclass(frozen=True)
class IsoPeak:
    """Factors of the speed ratio of two designs at equal peak multiplications per second."""

    omitted: float
    """Operations of the other design, divided by the operations of this design."""
    utilisation: float
    """Utilization of this design's multipliers, as a fraction."""
    other_utilisation: float

    @property
    def ratio(self) -> float:
        """Speed of this design, divided by the speed of the other design."""
        return self.omitted * self.utilisation / self.other_utilisation


def iso_peak(result: SimulationResult, other: SimulationResult) -> IsoPeak:
    """Return the factors of the speed ratio at equal peak. The factors are exact for the two results."""
    own, others = (sum(layer.macs for layer in each.layers) for each in (result, other))
    return IsoPeak(others / own, result.utilisation, other.utilisation)
