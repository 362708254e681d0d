"""Scan engine: times of items in a chain of stations (pipeline stages) with finite buffers, by a recurrence.

A station begins an item when the item has arrived, the station is free, and the next buffer has room:

    start[s, i] = max(end[s-1, i], end[s, i-1], start[s+1, i-B_s])        end[s, i] = start[s, i] + service[s, i]

s is the station, i the item, B_s the buffer after station s. The recurrence is exact for deterministic cycles and
memories without delays. All units (one head of one example) are computed in parallel. Without buffer limits, items are
computed in parallel too. `event_engine.py` also simulates memory delays."""

from collections.abc import Sequence

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.station_timeline import StationTimeline


def scan(service: np.ndarray, buffers: Sequence[int]) -> StationTimeline:
    """Return the timeline of all items. `service` (stations, units, items) holds integer cycles.

    `buffers` (stations - 1,) holds the capacity of each buffer between neighboring stations, in items; 0 for no limit.
    Raises UsageError for invalid arguments, see `check_service`.
    """
    check_service(service, buffers)
    start = _unlimited(service) if not any(buffers) else _limited(service, buffers)
    end = start + service
    free = np.zeros_like(start)
    free[:, :, 1:] = end[:, :, :-1]
    return StationTimeline(start, end, free, np.ones(len(service), dtype=np.int64))


def check_service(service: np.ndarray, buffers: Sequence[int]) -> None:
    """Raise UsageError unless `service` holds integers >= 0 and `buffers` has one capacity per pair of neighbors."""
    if service.ndim != 3 or not np.issubdtype(service.dtype, np.integer) or (service < 0).any():
        raise UsageError(
            f"service has dtype {service.dtype} and shape {service.shape}",
            fix="pass integer cycles >= 0 of shape (stations, units, items)",
        )
    if len(buffers) != len(service) - 1 or any(depth < 0 for depth in buffers):
        raise UsageError(
            f"{len(service)} stations have {len(service) - 1} buffers between them, not {list(buffers)}",
            fix="pass one capacity per buffer; 0 for no limit",
        )


def _unlimited(service: np.ndarray) -> np.ndarray:
    """Return start times without buffer limits: end[i] = max over j ≤ i of arrival[j] + service[j … i]."""
    start = np.empty_like(service)
    arrived = np.zeros_like(service[0])
    for station, cycles in enumerate(service):
        worked = np.cumsum(cycles, axis=-1)
        before = worked - cycles
        start[station] = np.maximum.accumulate(arrived - before, axis=-1) + before
        arrived = start[station] + cycles
    return start


def _limited(service: np.ndarray, buffers: Sequence[int]) -> np.ndarray:
    """Return start times with buffer limits, item by item. The time of item i at a station depends only on earlier
    items and on earlier stations.
    """
    stations, units, items = service.shape
    cycles = np.ascontiguousarray(service.transpose(2, 0, 1))  # (i, s, u): contiguous in the order of access
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
    """Return a lower bound on cycles per unit (units,): the larger of the cycles of the busiest station and of the
    longest item.
    """
    parallel = np.asarray(servers or [1] * len(service))[:, None]
    busiest = (-(-service.sum(-1) // parallel)).max(0)
    longest = service.sum(0).max(-1, initial=0)
    return np.maximum(busiest, longest)
