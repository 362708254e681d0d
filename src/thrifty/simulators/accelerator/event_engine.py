"""Event engine: discrete-event simulation of one unit's items through a chain of stations (pipeline stages).

The event engine covers features that `scan_engine.scan` cannot: parallel servers, reordering, and transfers through a
memory. The memory has banks, a crossbar, latency and a limit of requests in flight. Without these features, the times
equal the times of `scan_engine.scan`."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory
from thrifty.simulators.accelerator.station_timeline import StationTimeline


@dataclass(frozen=True, eq=False)
class StationUnit:
    """One station's work for one unit."""

    service: np.ndarray
    """Cycles per item, (items,); integers."""
    buffer: int = 0
    """Capacity of the buffer before the next station, in items; 0 for no limit."""
    servers: int = 1
    window: int = 1
    """Size of the reorder window: the station begins the first of its next `window` items that has arrived. 1 keeps the
    order."""
    memory: str = ""
    """Name of the memory that transfers each item after its service; empty for no transfer."""
    bytes: np.ndarray | None = None
    """Bytes per item (items,), if `memory` is set."""
    banks: np.ndarray | None = None
    """Bank of each item's first burst, (items,). By default, consecutive bursts use consecutive banks."""


def play(
    places: Sequence[StationUnit], memories: Sequence[AcceleratorMemory] = (), clock: float = 1.0
) -> StationTimeline:
    """Return the timeline of one unit, with times (stations, 1, items) in cycles of `clock` Hz.

    Raises UsageError if the numbers of items differ between stations, or if a memory is unknown.
    """
    if not places or any(len(place.service) != len(places[0].service) for place in places):
        raise UsageError(
            "the numbers of items differ between stations", fix="set a service of 0 for items that skip a station"
        )
    return _UnitPlay(places, memories, clock).run()


class _UnitPlay:
    def __init__(self, places: Sequence[StationUnit], memories: Sequence[AcceleratorMemory], clock: float):
        self.places = places
        self.channels = {memory.name: _Channel(memory, clock, self._at) for memory in memories}
        for place in places:
            if place.memory and place.memory not in self.channels:
                raise UsageError(
                    f"a station uses memory {place.memory!r}, which is not in the list",
                    fix=f"add memory {place.memory!r} to memories",
                )
        items = len(places[0].service)
        self.start = np.zeros((len(places), 1, items), dtype=np.int64)
        self.end, self.free = np.zeros_like(self.start), np.zeros_like(self.start)
        self.waiting = [deque(range(items)) for _ in places]
        """Items that each station has not begun, in order."""
        self.arrived = [set(range(items)), *(set() for _ in places[1:])]
        self.idle = [deque([0] * place.servers) for place in places]
        """For each idle server of a station, the time when the server became idle."""
        self.buffered = [0] * len(places)
        """Number of items that a station has begun and the next station has not."""
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = 0

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (time, self.number, action))

    def run(self) -> StationTimeline:
        self._at(0, lambda time: self._begin(0, 0))
        while self.queue:
            time, _, action = heapq.heappop(self.queue)
            action(time)
        servers = np.array([place.servers for place in self.places], dtype=np.int64)
        return StationTimeline(self.start, self.end, self.free, servers)

    def _begin(self, station: int, time: int) -> None:
        """Begin all items that can begin at a station. If any began, repeat for the previous station."""
        place, begun = self.places[station], False
        last = station == len(self.places) - 1
        while self.idle[station] and (last or not place.buffer or self.buffered[station] < place.buffer):
            item = self._next(station)
            if item is None:
                break
            begun = True
            self.start[station, 0, item], self.free[station, 0, item] = time, self.idle[station].popleft()
            if not last:
                self.buffered[station] += 1
            if station:
                self.buffered[station - 1] -= 1
            self._serve(station, item, time)
        if begun and station:
            self._begin(station - 1, time)

    def _next(self, station: int) -> int | None:
        """Remove and return the next item of a station, or None if no item of its window has arrived."""
        waiting, arrived = self.waiting[station], self.arrived[station]
        for place in range(min(self.places[station].window, len(waiting))):
            item = waiting[place]
            if item in arrived:
                del waiting[place]
                arrived.remove(item)
                return item
        return None

    def _serve(self, station: int, item: int, time: int) -> None:
        place = self.places[station]
        served = time + int(place.service[item])
        if not place.memory or place.bytes is None or not place.bytes[item]:
            self._at(served, lambda end: self._finish(station, item, int(end)))
            return
        bank = None if place.banks is None else int(place.banks[item])
        channel, size, server = self.channels[place.memory], float(place.bytes[item]), (station, item % place.servers)
        self._at(
            served, lambda now: channel.transfer(now, size, bank, server, lambda end: self._finish(station, item, end))
        )

    def _finish(self, station: int, item: int, time: int) -> None:
        self.end[station, 0, item] = time
        self.idle[station].append(time)
        if station + 1 < len(self.places):
            self.arrived[station + 1].add(item)
            self._begin(station + 1, time)
        self._begin(station, time)


class _Channel:
    """A memory with its crossbar. A request is one burst; ports and banks serve requests in order of arrival."""

    def __init__(self, memory: AcceleratorMemory, clock: float, at: Callable[[float, Callable[[float], None]], None]):
        self.memory, self.at = memory, at
        self.per_byte = memory.banks * clock / memory.bandwidth
        """Cycles per byte at one bank."""
        self.latency = memory.latency * clock
        self.banks, self.ports = [0.0] * memory.banks, [0.0] * max(memory.ports, 1)
        self.turn = 0
        self.in_flight = 0
        self.pending: deque[tuple[float, int, int, Callable[[float], None]]] = deque()

    def transfer(
        self, time: float, size: float, bank: int | None, server: tuple[int, int], done: Callable[[int], None]
    ) -> None:
        """Transfer `size` bytes. Call `done(end)` in the cycle in which the last byte arrives."""
        count = max(1, math.ceil(size / self.memory.burst))
        bank = self.turn if bank is None else bank
        self.turn = (bank + count) % self.memory.banks
        port = sum(server) % len(self.ports)

        def finish(end: float) -> None:
            whole = math.ceil(end - 1e-6)
            self.at(whole, lambda _: done(whole))

        if not self.memory.outstanding and self.memory.banks == 1 and not self.memory.ports:
            finish(self._send(time, size, 0, 0))  # consecutive bursts are one transfer
            return
        sizes = [min(self.memory.burst, size - number * self.memory.burst) for number in range(count)]
        bursts = [(part, (bank + number) % self.memory.banks) for number, part in enumerate(sizes)]
        if not self.memory.outstanding:
            finish(max(self._send(time, part, at, port) for part, at in bursts))
            return
        left, end = count, time

        def receive(now: float) -> None:
            nonlocal left, end
            left, end = left - 1, max(end, now)
            if not left:
                finish(end)

        self.pending.extend((part, at, port, receive) for part, at in bursts)
        self._issue(time)

    def _send(self, time: float, size: float, bank: int, port: int) -> float:
        sent = max(time, self.ports[port])
        self.ports[port] = sent + 1 if self.memory.ports else sent
        self.banks[bank] = max(sent, self.banks[bank]) + size * self.per_byte
        return self.banks[bank] + self.latency

    def _issue(self, time: float) -> None:
        while self.pending and self.in_flight < self.memory.outstanding:
            size, bank, port, receive = self.pending.popleft()
            self.in_flight += 1
            self.at(self._send(time, size, bank, port), lambda now, receive=receive: self._arrive(now, receive))

    def _arrive(self, time: float, receive: Callable[[float], None]) -> None:
        self.in_flight -= 1
        receive(time)
        self._issue(time)
