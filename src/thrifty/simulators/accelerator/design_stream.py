"""Streams of items that a design makes of a layer: cycles at each station, bytes and operations.

Shapes: s stations, u units of work (one head of one example), i items of a unit (queries, tiles, columns)."""

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
    """A layer's work for one design, in whole cycles. Shorter units are padded with items that take no time."""

    service: np.ndarray
    """(s, u, i) cycles that each item occupies each station of the machine."""
    macs: float
    """Multiply-accumulate operations of scores and values, as executed."""
    read: np.ndarray
    """(u,) bytes read from the outer memory before a unit can begin."""
    written: np.ndarray
    """(u,) bytes written to the outer memory after a unit."""
    lead: np.ndarray | int = 0
    """(u,) cycles before the first item."""
    active: Mapping[str, float] = field(default_factory=dict)
    """Active cycles over all units, by activity, for modules whose activity is not a station's service."""
    operations: Operations = field(default_factory=dict)
    overlapped: bool = False
    """True if reads and writes happen within the items' cycles, so that the outer memory adds none."""
    notes: tuple[str, ...] = ()
    transfers: Mapping[str, "ItemTransfer"] = field(default_factory=dict)
    """Transfers by station, for stations whose service is a transfer; the event engine computes their times."""
    servers: Mapping[str, int] = field(default_factory=dict)
    """Items that a station serves at a time, if not one; requires the event engine."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """Reorder windows by station, if not 1: the station takes the first arrived of its next items, up to this number.
    Requires the event engine."""

    @property
    def needs_events(self) -> bool:
        """True if the scan engine cannot compute the times."""
        return bool(self.servers or self.windows)


@dataclass(frozen=True)
class ItemTransfer:
    """Items that a station reads or writes through a memory."""

    memory: str
    bytes: np.ndarray
    """(u, i) bytes of each item."""
    banks: np.ndarray | None = None
    """(u, i) bank of an item's first burst; further bursts take the next banks. By default items follow each other."""


@dataclass(frozen=True)
class AcceleratorDesign:
    """An accelerator's rules. `lower` is called once for each layer of attention, or phase of a sparse product."""

    name: str
    stations: tuple[str, ...]
    """Stations in the order in which items pass them."""
    lower: Callable[[Any, AcceleratorSpec], ItemStream]
    """Function from an `AttentionLayer`, or another `workload`, and a machine to its items."""
    multipliers: Callable[[AcceleratorSpec], int]
    """Function from a machine to the multipliers of scores and values in one copy, which a budget counts."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings of a machine in addition to its stations, with their defaults."""
    sizes: tuple[str, ...] = ()
    """Names of the settings that are hardware sizes."""
    resized: Callable[[AcceleratorSpec, int], AcceleratorSpec] | None = None
    """Function from a machine and a budget of multipliers to one resized copy; None if only `copies` can change."""
    least: Callable[[AcceleratorSpec], int] = lambda machine: 1
    """Function from a machine to the fewest multipliers of a resized copy."""
    grows: bool = False
    """True if a larger budget enlarges the copy; otherwise it adds copies."""
    activities: tuple[str, ...] = ()
    """Names in `ItemStream.active` that modules may use, in addition to the stations."""
    workload: str = "attention"
    """ "attention", or "spgemm" for phases of products of sparse matrices."""

    def scaled(self, machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
        """Return the machine with at most `budget` multipliers in all copies together.

        Raises UsageError if the design cannot be as small.
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
    """Return `number` / `by`, rounded up: the cycles of `number` operations, `by` per cycle."""
    return -(-number // by)


def whole_cycles(cycles: np.ndarray) -> np.ndarray:
    """Round cycles to whole ones along the last dim, so that each running total is rounded up."""
    ends = np.ceil(np.cumsum(cycles, axis=-1) - 1e-6).astype(np.int64)
    return np.diff(ends, prepend=0)


def operand_bytes(layer: AttentionLayer, bits: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of queries, keys and values, and the bytes of the output, of each unit (u,)."""
    queries, keys = layer.unit_queries, layer.unit_keys
    each = layer.width * bits / 8
    return (queries + 2 * keys) * each, queries * each
