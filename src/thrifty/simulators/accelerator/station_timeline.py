"""Timelines of both engines: when each item is at each station, and why a station was idle.

Shapes: s stations, u units, i items of a unit."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class StationTimeline:
    """Times in cycles from the start of a unit."""

    start: np.ndarray
    """(s, u, i)"""
    end: np.ndarray
    """(s, u, i)"""
    free: np.ndarray
    """(s, u, i) time since which the server that takes an item had been idle."""
    servers: np.ndarray
    """(s,) items that a station serves at a time."""

    @cached_property
    def makespan(self) -> np.ndarray:
        """(u,) cycles until the last item leaves the last station."""
        return self.end.max(axis=(0, 2), initial=0)

    @property
    def latency(self) -> np.ndarray:
        """(u,) cycles of the first item through all stations."""
        return self.end[-1, :, 0] - self.start[0, :, 0]

    @cached_property
    def busy(self) -> np.ndarray:
        """(s, u) cycles in which a station serves."""
        return (self.end - self.start).sum(-1)

    @cached_property
    def blocked(self) -> np.ndarray:
        """(s, u) cycles in which a station had an item, but the buffer after it was full."""
        arrived = np.zeros_like(self.start)
        arrived[1:] = self.end[:-1]
        is_real = (self.end > self.start).any(0)  # padding items of shorter units take no time at any station
        return ((self.start - np.maximum(arrived, self.free)) * is_real).sum(-1)

    @cached_property
    def starved(self) -> np.ndarray:
        """(s, u) cycles in which a station had no item, including the cycles after its last item."""
        return self.servers[:, None] * self.makespan - self.busy - self.blocked
