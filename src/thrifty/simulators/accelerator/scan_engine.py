"""The scan engine: stations in tandem with finite buffers, as a recurrence.

A station begins an item when it has arrived, when the one before has left, and when there is room behind:

    start[s, i] = max(end[s-1, i], end[s, i-1], start[s+1, i-B_s])        end[s, i] = start[s, i] + service[s, i]

which is exact for deterministic service and memories that never make anybody wait. All units (heads of examples) go
through it together; where buffers have no limit, so do all items. `event_engine.py` is the other engine.
"""

from collections.abc import Sequence

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.station_timeline import StationTimeline


def scan(service: np.ndarray, buffers: Sequence[int]) -> StationTimeline:
    """Times of all items, from `service` (s, u, i) in whole cycles and the (s - 1,) items that fit between a station
    and the next, 0 for no limit."""
    check_service(service, buffers)
    start = _unlimited(service) if not any(buffers) else _limited(service, buffers)
    end = start + service
    free = np.zeros_like(start)
    free[:, :, 1:] = end[:, :, :-1]
    return StationTimeline(start, end, free, np.ones(len(service), dtype=np.int64))


def check_service(service: np.ndarray, buffers: Sequence[int]) -> None:
    """Raises UsageError for service that is no whole number of cycles, or buffers that do not fit the stations."""
    if service.ndim != 3 or not np.issubdtype(service.dtype, np.integer) or (service < 0).any():
        raise UsageError(
            f"service must be whole cycles from 0 on, (stations, units, items); it is {service.dtype} {service.shape}"
        )
    if len(buffers) != len(service) - 1 or any(depth < 0 for depth in buffers):
        raise UsageError(
            f"{len(service)} stations have {len(service) - 1} buffers between them, not {list(buffers)}",
            fix="at least 1 item each, 0 for no limit",
        )


def _unlimited(service: np.ndarray) -> np.ndarray:
    """Nobody is ever blocked: end[i] = max over j ≤ i of arrival[j] + service[j … i], a running maximum."""
    start = np.empty_like(service)
    arrived = np.zeros_like(service[0])
    for station, cycles in enumerate(service):
        worked = np.cumsum(cycles, axis=-1)
        before = worked - cycles
        start[station] = np.maximum.accumulate(arrived - before, axis=-1) + before
        arrived = start[station] + cycles
    return start


def _limited(service: np.ndarray, buffers: Sequence[int]) -> np.ndarray:
    """Item by item: when item i begins at s, all earlier ones have begun everywhere."""
    stations, units, items = service.shape
    cycles = np.ascontiguousarray(service.transpose(2, 0, 1))  # (i, s, u): what is read together lies together
    start = np.empty_like(cycles)
    free = np.zeros((stations, units), dtype=cycles.dtype)
    for item in range(items):
        arrived = np.zeros(units, dtype=cycles.dtype)
        for station in range(stations):
            begin = np.maximum(arrived, free[station], out=start[item, station])
            if station < stations - 1 and 0 < buffers[station] <= item:
                np.maximum(begin, start[item - buffers[station], station + 1], out=begin)
            arrived = begin + cycles[item, station]
            free[station] = arrived
    return np.ascontiguousarray(start.transpose(1, 2, 0))


def bound(service: np.ndarray, servers: Sequence[int] | None = None) -> np.ndarray:
    """(u,) cycles that no order of the items can go below: the busiest station's work, and the longest item's path."""
    at_a_time = np.asarray(servers or [1] * len(service))[:, None]
    busiest = (-(-service.sum(-1) // at_a_time)).max(0)
    longest = service.sum(0).max(-1, initial=0)
    return np.maximum(busiest, longest)
