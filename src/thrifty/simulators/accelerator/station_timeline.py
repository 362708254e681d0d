"""When each item is at each station, and why a station was idle: what both engines give.

Shapes: s stations, u units, i items of a unit.
"""

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
    """(s, u, i) since when the server that takes an item had been idle."""
    servers: np.ndarray
    """(s,) items that a station serves at a time."""

    @cached_property
    def makespan(self) -> np.ndarray:
        """(u,) cycles until the last item has left the last station."""
        return self.end.max(axis=(0, 2), initial=0)

    @property
    def latency(self) -> np.ndarray:
        """(u,) cycles that the first item takes through all stations."""
        return self.end[-1, :, 0] - self.start[0, :, 0]

    @cached_property
    def busy(self) -> np.ndarray:
        """(s, u) cycles in which a station serves."""
        return (self.end - self.start).sum(-1)

    @cached_property
    def blocked(self) -> np.ndarray:
        """(s, u) cycles in which a station had an item and no room behind it for what comes of that."""
        arrived = np.zeros_like(self.start)
        arrived[1:] = self.end[:-1]
        is_real = (self.end > self.start).any(0)  # what fills up shorter units takes no time anywhere
        return ((self.start - np.maximum(arrived, self.free)) * is_real).sum(-1)

    @cached_property
    def starved(self) -> np.ndarray:
        """(s, u) cycles in which a station had no item, those after its last one included."""
        return self.servers[:, None] * self.makespan - self.busy - self.blocked
