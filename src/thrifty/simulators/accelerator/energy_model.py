"""Energy by two methods: power of published modules over their active cycles, and counted actions by an energy table.

Tables differ by 2 to 18 times for the same action. So every energy names its table, and `by_tables` compares all."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation

PICOJOULE = 1e-12
_GROWTH = {"int_multiply": 2.0, "float_multiply": 2.0, "sram": 0.5}
"""Exponents, by kind, for a table with one point: energy scales with this power of the bits (bytes for "sram"). Other
kinds scale in proportion. Both are assumptions."""


@dataclass(frozen=True)
class EnergyEstimate:
    """An energy in J, and its method."""

    mode: str
    """ "activity" or "actions"."""
    table: str
    """Source of the prices: "published modules", or the name of a table."""
    total: float
    parts: Mapping[str, float]
    """J by module, or by kind of action."""
    unpriced: tuple[str, ...] = ()
    """Actions missing in the table; the total excludes them."""


@dataclass(frozen=True)
class EnergyTable:
    """Energies of actions in pJ."""

    name: str
    source: str
    grade: str
    points: Mapping[str, Mapping[int, float]]
    """pJ by kind and bits (for "sram", bytes of the memory)."""
    unit_bits: Mapping[str, int] = field(default_factory=dict)
    """Bits per access that the points of "sram" refer to."""

    def picojoules(self, operation: PricedOperation) -> float | None:
        """Return the pJ of one action, interpolated on a logarithmic scale, or None if the table lacks its kind."""
        points = self.points.get(operation.kind)
        if points is None:
            return None
        if operation.kind == "sram":
            accesses = operation.bits / self.unit_bits[operation.kind]
            return accesses * _between(points, max(operation.capacity, 1), _GROWTH["sram"])
        return _between(points, operation.bits, _GROWTH.get(operation.kind, 1.0))


def _between(points: Mapping[int, float], at: float, growth: float) -> float:
    places = sorted(points)
    if len(places) == 1:
        return points[places[0]] * (at / places[0]) ** growth
    upper = next((n for n in range(1, len(places)) if places[n] >= at), len(places) - 1)
    low, high = places[upper - 1], places[upper]
    slope = math.log(points[high] / points[low]) / math.log(high / low)
    return points[low] * (at / low) ** slope


def table_names() -> list[str]:
    folder = files("thrifty.simulators.accelerator") / "tables"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


@cache
def find_table(name: str, end: str = "points") -> EnergyTable:
    """Return a table by its name; `end` is "low" or "high" for the ends of published ranges."""
    refuse_unknown("there is no energy table", name, table_names())
    content = tomllib.loads(
        (files("thrifty.simulators.accelerator") / "tables" / f"{name}.toml").read_text(encoding="utf-8")
    )
    kinds = {kind: part for kind, part in content.items() if isinstance(part, dict)}
    points = {
        kind: {int(at): float(pj) for at, pj in part.get(end, part["points"]).items()} for kind, part in kinds.items()
    }
    unit = {kind: part["bits"] for kind, part in kinds.items() if "bits" in part}
    return EnergyTable(name, content["source"], content["grade"], points, unit)


def by_activity(machine: AcceleratorSpec, active: Mapping[str, float], cycles: float) -> EnergyEstimate | None:
    """Return the energy of each module's dynamic power while active, and of static power for all `cycles`.

    `active` counts cycles of all copies together, by station or activity; during `cycles` all copies are on. Returns
    None if no power is published.
    """
    if not any(module.dynamic or module.static for module in machine.modules.values()):
        return None
    parts = {}
    for name, module in machine.modules.items():
        # the energy of an active cycle does not depend on the clock
        parts[name] = module.dynamic * active.get(module.active, 0.0) / module.clock
        parts[name] += module.static * cycles * machine.copies / machine.clock
    return EnergyEstimate("activity", "published modules", sum(parts.values()), parts)


def by_actions(operations: Operations, table: EnergyTable) -> EnergyEstimate:
    """Return the energy of counted actions by a table."""
    parts: dict[str, float] = {}
    unpriced = set()
    for operation, count in operations.items():
        each = table.picojoules(operation)
        if each is None:
            unpriced.add(operation.kind)
        else:
            parts[operation.kind] = parts.get(operation.kind, 0.0) + count * each * PICOJOULE
    return EnergyEstimate("actions", table.name, sum(parts.values()), parts, tuple(sorted(unpriced)))


def by_tables(operations: Operations) -> list[EnergyEstimate]:
    """Return the energy by every table, and by both ends of published ranges."""
    estimates = [by_actions(operations, find_table(name)) for name in table_names()]
    for name in table_names():
        for end in ("low", "high"):
            table = find_table(name, end)
            if table.points != find_table(name).points:
                estimates.append(replace(by_actions(operations, table), table=f"{name}, {end}"))
    return estimates
