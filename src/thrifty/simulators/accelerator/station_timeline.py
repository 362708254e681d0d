"""Timelines of both engines: start and end of each item at each station, and idle cycles by cause.

Shapes: s stations (pipeline stages), u units (heads of examples), i items per unit."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class StationTimeline:
    """Times of items, in cycles from the start of the unit."""

    start: np.ndarray
    """Start of each item at each station, (s, u, i)."""
    end: np.ndarray
    """End of each item at each station, (s, u, i)."""
    free: np.ndarray
    """Time when the server that processes an item became idle before the item, (s, u, i)."""
    servers: np.ndarray
    """Number of items that each station processes in parallel, (s,)."""

    @cached_property
    def makespan(self) -> np.ndarray:
        """Cycles until the last item leaves the last station, per unit (u,)."""
        return self.end.max(axis=(0, 2), initial=0)

    @property
    def latency(self) -> np.ndarray:
        """Cycles of the first item through all stations, per unit (u,)."""
        return self.end[-1, :, 0] - self.start[0, :, 0]

    @cached_property
    def busy(self) -> np.ndarray:
        """Busy cycles per station and unit, (s, u)."""
        return (self.end - self.start).sum(-1)

    @cached_property
    def blocked(self) -> np.ndarray:
        """Idle cycles with a waiting item but a full next buffer, per station and unit, (s, u)."""
        arrived = np.zeros_like(self.start)
        arrived[1:] = self.end[:-1]
        is_real = (self.end > self.start).any(0)  # padding items of shorter units take no time at any station
        return ((self.start - np.maximum(arrived, self.free)) * is_real).sum(-1)

    @cached_property
    def starved(self) -> np.ndarray:
        """Idle cycles without an item, including those after the last item, per station and unit, (s, u)."""
        return self.servers[:, None] * self.makespan - self.busy - self.blocked
