"""What a design makes of a layer: items through stations in tandem, with their cycles, bytes and operations.

Shapes: s stations, u units of work (one head of one example), i items of a unit (queries, tiles, columns).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec, Setting
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.priced_operations import Operations


@dataclass(frozen=True)
class ItemStream:
    """A layer's work for one design. Cycles are whole numbers.

    Units with fewer items than others end in items that take no time.
    """

    service: np.ndarray
    """(s, u, i) cycles that each item occupies each station of the machine."""
    macs: float
    """Multiply-accumulate operations of scores and values that are carried out."""
    read: np.ndarray
    """(u,) bytes from the outer memory before a unit can begin."""
    written: np.ndarray
    """(u,) bytes to the outer memory after it."""
    lead: np.ndarray | int = 0
    """(u,) cycles before the first item."""
    active: Mapping[str, float] = field(default_factory=dict)
    """Cycles in which modules are at work, all units together, where that is not a station's service."""
    operations: Operations = field(default_factory=dict)
    overlapped: bool = False
    """Whether `read` and `written` happen within the items' cycles, so that the outer memory adds none."""
    notes: tuple[str, ...] = ()
    transfers: Mapping[str, "ItemTransfer"] = field(default_factory=dict)
    """Stations whose service is a transfer, by name: the event engine asks the memory how long each takes."""
    servers: Mapping[str, int] = field(default_factory=dict)
    """Items that a station serves at a time, where that is not one; such streams are played by events."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """Of how many items in order a station takes the first that has arrived, where that is not one; likewise."""

    @property
    def needs_events(self) -> bool:
        """Whether the scan cannot say when its items are served."""
        return bool(self.servers or self.windows)


@dataclass(frozen=True)
class ItemTransfer:
    """Items that are fetched, or written, at a station."""

    memory: str
    bytes: np.ndarray
    """(u, i)."""
    banks: np.ndarray | None = None
    """(u, i) the bank of an item's first burst; bursts go on from there. Items follow each other where not given."""


@dataclass(frozen=True)
class AcceleratorDesign:
    """An accelerator's rules. `lower` is called once for each layer of attention, or phase of a sparse product."""

    name: str
    stations: tuple[str, ...]
    """In the order in which items pass them."""
    lower: Callable[[Any, AcceleratorSpec], ItemStream]
    """Of an `AttentionLayer`, or of what else `workload` names."""
    multipliers: Callable[[AcceleratorSpec], int]
    """Multipliers of scores and values in one copy: what a budget of multipliers counts."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """What a machine may set besides its stations, with the defaults."""
    sizes: tuple[str, ...] = ()
    """Names of the settings that are hardware sizes."""
    resized: Callable[[AcceleratorSpec, int], AcceleratorSpec] | None = None
    """One copy with at most so many multipliers; None for a design of one size, of which there are more or fewer."""
    least: Callable[[AcceleratorSpec], int] = lambda machine: 1
    """The fewest multipliers that a resized copy has."""
    grows: bool = False
    """True if one copy may be larger than the machine's; more of them have the larger budgets of other designs."""
    activities: tuple[str, ...] = ()
    """Names in `ItemStream.active` that modules may go by, besides the stations."""
    workload: str = "attention"
    """Or "spgemm": phases of products of sparse matrices."""

    def scaled(self, machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
        """The machine with at most so many multipliers, all copies together; UsageError where it cannot be so small."""
        own = self.multipliers(machine)
        least = own if self.resized is None else self.least(machine)
        if budget < least:
            raise UsageError(f"{machine.name} needs {least} multipliers, not {budget}", fix=f"give at least {least}")
        if self.resized is None or (budget >= own and not self.grows):
            return replace(machine, copies=budget // own)
        return replace(self.resized(machine, budget), copies=1)


def ceil_div(number: np.ndarray, by: int) -> np.ndarray:
    """Whole cycles for `number` things, `by` at a time."""
    return -(-number // by)


def whole_cycles(cycles: np.ndarray) -> np.ndarray:
    """Whole cycles along the last dim that add up to those given, rounded up at each place."""
    ends = np.ceil(np.cumsum(cycles, axis=-1) - 1e-6).astype(np.int64)
    return np.diff(ends, prepend=0)


def operand_bytes(layer: AttentionLayer, bits: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of queries, keys and values, and bytes of the output, of each unit (u,)."""
    queries, keys = layer.unit_queries, layer.unit_keys
    each = layer.width * bits / 8
    return (queries + 2 * keys) * each, queries * each
