"""Energy by two methods: published power of modules in their active cycles, or counted operations by an energy table.

Tables differ by factors of 2 to 18 for the same operation. Therefore each estimate names its table, and `by_tables`
compares all tables."""

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
"""Exponents by kind, for tables with one value per kind. Energy scales with the bits (for "sram": bytes) to this power;
the default exponent is 1. All exponents are assumptions.
"""


@dataclass(frozen=True)
class EnergyEstimate:
    """Energy in J by one method."""

    mode: str
    """ "activity" or "actions"."""
    table: str
    """Source of the estimate: "published modules", or the name of a table."""
    total: float
    parts: Mapping[str, float]
    """Energy in J by module, or by kind of operation."""
    unpriced: tuple[str, ...] = ()
    """Kinds of operations missing in the table. The total excludes these operations."""


@dataclass(frozen=True)
class EnergyTable:
    """Energy per operation in pJ."""

    name: str
    source: str
    grade: str
    points: Mapping[str, Mapping[int, float]]
    """Energy in pJ by kind of operation, then by bits (for "sram": by bytes of the memory)."""
    unit_bits: Mapping[str, int] = field(default_factory=dict)
    """Bits per access for the points of "sram"."""

    def picojoules(self, operation: PricedOperation) -> float | None:
        """Return the energy of one operation in pJ, log-log interpolated, or None if the table lacks the kind."""
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
    """Return a table by name. `end` selects its values: "points", or the ends "low" and "high" of published ranges."""
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
    """Return the energy of dynamic power in active cycles plus static power in all `cycles`, by module.

    `active` holds active cycles by station or activity, summed over copies. All copies are on for `cycles`. Returns
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
    """Return the energy of counted operations by one table."""
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
    """Return one estimate per table, and two more ("low" and "high") for a table with published ranges."""
    estimates = [by_actions(operations, find_table(name)) for name in table_names()]
    for name in table_names():
        for end in ("low", "high"):
            table = find_table(name, end)
            if table.points != find_table(name).points:
                estimates.append(replace(by_actions(operations, table), table=f"{name}, {end}"))
    return estimates
