"""Results of a simulation: cycles, stalls, bytes, operations, energy and area."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.energy_model import EnergyEstimate
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up
from thrifty.simulators.accelerator.station_timeline import StationTimeline

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class StationTime:
    """Cycles of a station (pipeline stage), summed over all units and copies."""

    busy: float
    starved: float
    """Idle cycles without an item."""
    blocked: float
    """Idle cycles in which an item waits because the next buffer is full."""


@dataclass(frozen=True)
class LayerResult:
    """The result of one layer, or of one phase of a sparse product."""

    name: str
    units: int
    cycles: int
    bound: int
    """Lower bound on cycles for any order of items: the larger of the cycles of the busiest station and of the
    transfers.
    """
    waiting: int
    """Cycles that the outer memory adds."""
    stations: Mapping[str, StationTime]
    read: float
    """Bytes read from the outer memory."""
    written: float
    macs: float
    dense_macs: float
    """Multiply-accumulate operations without a mask and without padding."""
    operations: Operations
    active: Mapping[str, float]
    density: float
    example: StationTimeline | None = field(default=None, repr=False, compare=False)
    """Timeline of the first unit, for plots."""


@dataclass(frozen=True)
class SimulationResult:
    """The result of one machine on one workload."""

    machine: AcceleratorSpec
    trace: str
    engine: str
    multipliers: int
    """Number of multipliers for scores and values, in all copies together."""
    layers: tuple[LayerResult, ...]
    energies: tuple[EnergyEstimate, ...]
    notes: tuple[str, ...] = ()

    @property
    def cycles(self) -> int:
        return sum(layer.cycles for layer in self.layers)

    @property
    def seconds(self) -> float:
        return self.cycles / self.machine.clock

    @property
    def utilisation(self) -> float:
        """Fraction of multiplier cycles with a multiply-accumulate."""
        return sum(layer.macs for layer in self.layers) / (self.multipliers * self.cycles)

    @property
    def dense_rate(self) -> float:
        """Throughput in operations/s. All pairs count as computed, and a multiply-accumulate counts as two
        operations."""
        return 2 * sum(layer.dense_macs for layer in self.layers) / self.seconds

    @property
    def area(self) -> float | None:
        """Area of all copies in mm²; None if unknown."""
        return None if self.machine.area is None else self.machine.area * self.machine.copies

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes moved, by memory."""
        moved = {
            "outer memory, read": sum(layer.read for layer in self.layers),
            "outer memory, written": sum(layer.written for layer in self.layers),
        }
        for operation, count in self.operations.items():
            if operation.kind == "sram":
                level = f"memory of {operation.capacity} bytes"
                moved[level] = moved.get(level, 0.0) + count * operation.bits / 8
        return moved

    @property
    def operations(self) -> Operations:
        return add_up(*(layer.operations for layer in self.layers))

    @property
    def stations(self) -> dict[str, StationTime]:
        names = self.layers[0].stations
        return {
            name: StationTime(*(sum(getattr(layer.stations[name], kind) for layer in self.layers) for kind in _STALLS))
            for name in names
        }

    def energy(self, mode: str) -> EnergyEstimate | None:
        """Return the estimate of a mode, "activity" or "actions", or None if the result has no such estimate."""
        return next((energy for energy in self.energies if energy.mode == mode), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for example for JSON."""
        return {
            **self.row(),
            **{key: getattr(self.machine, key) for key in ("design", "clock", "node", "copies")},
            "engine": self.engine,
            "source": self.machine.source,
            "grade": self.machine.grade,
            "stations": {name: vars(time) for name, time in self.stations.items()},
            "bytes": self.bytes,
            "operations": {str_of(operation): count for operation, count in self.operations.items()},
            "energies": [vars(energy) for energy in self.energies],
            "layers": layer_rows(self),
            "notes": list(self.notes),
        }

    def row(self) -> dict[str, Any]:
        """Return the main values of the result, in SI units and mm²."""
        activity, actions = self.energy("activity"), self.energy("actions")
        return {
            "machine": self.machine.name,
            "trace": self.trace,
            "cycles": self.cycles,
            "seconds": self.seconds,
            "energy_by_activity": activity.total if activity else None,
            "energy_by_actions": actions.total if actions else None,
            "energy_table": actions.table if actions else None,
            "area_mm2": self.area,
            "multipliers": self.multipliers,
            "utilisation": self.utilisation,
            "dense_operations_per_second": self.dense_rate,
            "outer_bytes": sum(layer.read + layer.written for layer in self.layers),
        }


_STALLS = ("busy", "starved", "blocked")


def str_of(operation: PricedOperation) -> str:
    """Return an operation as text, for example "sram, 576 bits of 36864 bytes"."""
    size = f" of {operation.capacity} bytes" if operation.capacity else ""
    return f"{operation.kind}, {operation.bits} bits{size}"


def layer_rows(result: SimulationResult) -> list[dict[str, Any]]:
    """Return one row per layer."""
    return [
        {
            "layer": layer.name,
            "units": layer.units,
            "cycles": layer.cycles,
            "bound": layer.bound,
            "waiting": layer.waiting,
            "density": layer.density,
            "utilisation": layer.macs / (result.multipliers * layer.cycles),
            "read": layer.read,
            "written": layer.written,
            **{f"{name}_{kind}": getattr(t, kind) for name, t in layer.stations.items() for kind in _STALLS},
        }
        for layer in result.layers
    ]


def frame(results: list[SimulationResult]) -> "DataFrame":
    """Return a pandas DataFrame with one row per result. Raises UsageError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise UsageError("a DataFrame requires pandas", fix="pip install pandas; or use result.row()") from error
    return pandas.DataFrame([result.row() for result in results])
