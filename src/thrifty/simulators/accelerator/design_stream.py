"""Streams of work items. A design converts a layer to a stream: cycles at each station, bytes and operations.

A station is a pipeline stage of the machine. A unit is one head of one example. An item is a part of a unit, such as a
query, tile or column.
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
    """The work of one layer for one design, in integer cycles. Units are padded with items of 0 cycles."""

    service: np.ndarray
    """Cycles of each item at each station, (stations, units, items)."""
    macs: float
    """Executed multiply-accumulate operations of scores and values."""
    read: np.ndarray
    """Bytes read from the outer memory before each unit begins, (units,)."""
    written: np.ndarray
    """Bytes written to the outer memory after each unit, (units,)."""
    lead: np.ndarray | int = 0
    """Cycles before the first item of each unit, (units,)."""
    active: Mapping[str, float] = field(default_factory=dict)
    """Active cycles over all units, by activity, for modules that follow an activity instead of a station."""
    operations: Operations = field(default_factory=dict)
    overlapped: bool = False
    """True if the cycles of items include reads and writes. The outer memory then adds no cycles."""
    notes: tuple[str, ...] = ()
    transfers: Mapping[str, "ItemTransfer"] = field(default_factory=dict)
    """Transfers by station, for stations that move data. The event engine computes the transfer times."""
    servers: Mapping[str, int] = field(default_factory=dict)
    """Number of items that a station processes in parallel, if not 1. Requires the event engine."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """Size of the reorder window by station, if not 1. A station begins the first item in its window that has arrived.
    Requires the event engine.
    """

    @property
    def needs_events(self) -> bool:
        """True if the scan engine cannot compute the times."""
        return bool(self.servers or self.windows)


@dataclass(frozen=True)
class ItemTransfer:
    """The bytes that a station reads or writes through a memory, per item."""

    memory: str
    bytes: np.ndarray
    """Bytes of each item, (units, items)."""
    banks: np.ndarray | None = None
    """Bank of each item's first burst, (units, items). Later bursts use the next banks. By default, consecutive bursts
    use consecutive banks.
    """


@dataclass(frozen=True)
class AcceleratorDesign:
    """An accelerator design. `lower` is called once per attention layer, or per phase of a sparse matrix product."""

    name: str
    stations: tuple[str, ...]
    """Names of the stations, in the order in which items pass."""
    lower: Callable[[Any, AcceleratorSpec], ItemStream]
    """Function from a layer (or phase) and a machine to the stream of items."""
    multipliers: Callable[[AcceleratorSpec], int]
    """Function from a machine to the number of multipliers for scores and values in one copy. A budget limits this
    number.
    """
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings of a machine in addition to its stations, with defaults."""
    sizes: tuple[str, ...] = ()
    """Names of the settings that are hardware sizes."""
    resized: Callable[[AcceleratorSpec, int], AcceleratorSpec] | None = None
    """Function from a machine and a budget of multipliers to one resized copy. None if only `copies` can change."""
    least: Callable[[AcceleratorSpec], int] = lambda machine: 1
    """Function from a machine to the minimum number of multipliers of a resized copy."""
    grows: bool = False
    """True if a larger budget enlarges the copy. False if a larger budget adds copies."""
    activities: tuple[str, ...] = ()
    """Names of activities that modules may use in addition to stations, see `ItemStream.active`."""
    workload: str = "attention"
    """ "attention", or "spgemm" for sparse matrix products."""

    def scaled(self, machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
        """Scale the machine so that all its copies together have at most `budget` multipliers.

        Raises UsageError if `budget` is below the design's minimum.
        """
        own = self.multipliers(machine)
        least = own if self.resized is None else self.least(machine)
        if budget < least:
            raise UsageError(
                f"{machine.name!r} requires at least {least} multipliers, not {budget}", fix=f"multipliers={least}"
            )
        if self.resized is None or (budget >= own and not self.grows):
            return replace(machine, copies=budget // own)
        return replace(self.resized(machine, budget), copies=1)


def ceil_div(number: np.ndarray, by: int) -> np.ndarray:
    """Return the cycles of `number` operations at `by` operations per cycle: the quotient, rounded up."""
    return -(-number // by)


def whole_cycles(cycles: np.ndarray) -> np.ndarray:
    """Convert fractional cycles to integers. Each running total along the last dim is the exact total, rounded up."""
    ends = np.ceil(np.cumsum(cycles, axis=-1) - 1e-6).astype(np.int64)
    return np.diff(ends, prepend=0)


def operand_bytes(layer: AttentionLayer, bits: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of each unit's inputs (queries, keys, values), and the bytes of its outputs, each (units,)."""
    queries, keys = layer.unit_queries, layer.unit_keys
    each = layer.width * bits / 8
    return (queries + 2 * keys) * each, queries * each
