"""Energy in two ways: what published modules take while they are at work, and counted actions by a table.

Tables differ by 2 to 18 times for one and the same action, so every energy names its own, and `by_tables` shows all.
"""

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
"""Where a table has one point, energy goes with this power of the bits (of the bytes for "sram"), else in proportion:
an assumption."""


@dataclass(frozen=True)
class EnergyEstimate:
    """An energy in J, and how it was found."""

    mode: str
    """ "activity" or "actions"."""
    table: str
    """What it was priced by: "published modules", or the name of a table."""
    total: float
    parts: Mapping[str, float]
    """J by module, or by kind of action."""
    unpriced: tuple[str, ...] = ()
    """Actions that the table does not know; they are not in the total."""


@dataclass(frozen=True)
class EnergyTable:
    """Energies of actions in pJ."""

    name: str
    source: str
    grade: str
    points: Mapping[str, Mapping[int, float]]
    """By kind, bits (for "sram" bytes of the memory) to pJ."""
    unit_bits: Mapping[str, int] = field(default_factory=dict)
    """Bits that a point of "sram" is for."""

    def picojoules(self, operation: PricedOperation) -> float | None:
        """Of one action, between the points on a logarithmic scale; None where the table has none of its kind."""
        points = self.points.get(operation.kind)
        if points is None:
            return None
        if operation.kind == "sram":
            share = operation.bits / self.unit_bits[operation.kind]
            return share * _between(points, max(operation.capacity, 1), _GROWTH["sram"])
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
    """A table by its name; `end` is "low" or "high" for the ends of what is published as a range."""
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
    """Each module's power while at work, and all static power for all `cycles`; None where no power is published.

    `active` is cycles of all copies together, by station or activity; `cycles` is how long all copies are on.
    """
    if not any(module.dynamic or module.static for module in machine.modules.values()):
        return None
    parts = {}
    for name, module in machine.modules.items():
        # a cycle of work takes the same energy at any clock
        parts[name] = module.dynamic * active.get(module.active, 0.0) / module.clock
        parts[name] += module.static * cycles * machine.copies / machine.clock
    return EnergyEstimate("activity", "published modules", sum(parts.values()), parts)


def by_actions(operations: Operations, table: EnergyTable) -> EnergyEstimate:
    """Counted actions by a table."""
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
    """How much the choice of a table decides: every table, and both ends of ranges."""
    estimates = [by_actions(operations, find_table(name)) for name in table_names()]
    for name in table_names():
        for end in ("low", "high"):
            table = find_table(name, end)
            if table.points != find_table(name).points:
                estimates.append(replace(by_actions(operations, table), table=f"{name}, {end}"))
    return estimates
