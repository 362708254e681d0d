"""Timelines of the scan and event engines: start and end of each item at each station, and idle cycles by cause.

A station is a pipeline stage of the machine; a unit is one head of one example.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class StationTimeline:
    """Times of items, in cycles from the start of the unit."""

    start: np.ndarray
    """Start of each item at each station, (stations, units, items)."""
    end: np.ndarray
    """End of each item at each station, (stations, units, items)."""
    free: np.ndarray
    """Time at which the server of each item has finished its previous item, (stations, units, items)."""
    servers: np.ndarray
    """Number of items that each station processes in parallel, (stations,)."""

    @cached_property
    def makespan(self) -> np.ndarray:
        """Cycles until the last item leaves the last station, per unit (units,)."""
        return self.end.max(axis=(0, 2), initial=0)

    @property
    def latency(self) -> np.ndarray:
        """Cycles of the first item through all stations, per unit (units,)."""
        return self.end[-1, :, 0] - self.start[0, :, 0]

    @cached_property
    def busy(self) -> np.ndarray:
        """Busy cycles, (stations, units)."""
        return (self.end - self.start).sum(-1)

    @cached_property
    def blocked(self) -> np.ndarray:
        """Idle cycles in which an item waits because the next buffer is full, (stations, units)."""
        arrived = np.zeros_like(self.start)
        arrived[1:] = self.end[:-1]
        is_real = (self.end > self.start).any(0)  # padding items of shorter units take no time at any station
        return ((self.start - np.maximum(arrived, self.free)) * is_real).sum(-1)

    @cached_property
    def starved(self) -> np.ndarray:
        """Idle cycles without an item, including cycles after the last item, (stations, units)."""
        return self.servers[:, None] * self.makespan - self.busy - self.blocked
