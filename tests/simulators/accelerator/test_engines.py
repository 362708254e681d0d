"""Both engines equal a plain loop without memory delays, and are later with memory delays."""

import heapq
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory
from thrifty.simulators.accelerator.event_engine import StationUnit, play
from thrifty.simulators.accelerator.scan_engine import bound, scan


def by_loops(service: np.ndarray, buffers: list[int]) -> np.ndarray:
    """Return the end times by the recurrence, one element at a time."""
    stations, units, items = service.shape
    start, end = np.zeros_like(service), np.zeros_like(service)
    for unit in range(units):
        for item in range(items):
            for station in range(stations):
                begin = 0
                if station:
                    begin = max(begin, end[station - 1, unit, item])
                if item:
                    begin = max(begin, end[station, unit, item - 1])
                if station < stations - 1 and buffers[station] and item >= buffers[station]:
                    begin = max(begin, start[station + 1, unit, item - buffers[station]])
                start[station, unit, item] = begin
                end[station, unit, item] = begin + service[station, unit, item]
    return end


@st.composite
def streams(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    stations, units, items = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    service = random.integers(0, 9, (stations, units, items))
    return service, draw(st.lists(st.integers(0, 3), min_size=stations - 1, max_size=stations - 1))


@given(streams())
def test_scan_equals_the_recurrence(stream: tuple[np.ndarray, list[int]]) -> None:
    service, buffers = stream
    assert np.array_equal(scan(service, buffers).end, by_loops(service, buffers))


@given(streams())
def test_events_equal_the_scan_without_shared_resources(stream: tuple[np.ndarray, list[int]]) -> None:
    service, buffers = stream
    scanned = scan(service, buffers)
    for unit in range(service.shape[1]):
        places = [StationUnit(service[s, unit], (*buffers, 0)[s]) for s in range(len(service))]
        played = play(places)
        assert np.array_equal(played.start[:, 0], scanned.start[:, unit])
        assert np.array_equal(played.end[:, 0], scanned.end[:, unit])
        for kind in ("busy", "blocked", "starved"):
            assert np.array_equal(getattr(played, kind)[:, 0], getattr(scanned, kind)[:, unit]), kind


@given(streams())
def test_cycles_are_busy_blocked_or_starved_and_bounded(
    stream: tuple[np.ndarray, list[int]],
) -> None:
    service, buffers = stream
    result = scan(service, buffers)
    assert (result.busy == service.sum(-1)).all()
    assert (result.blocked >= 0).all() and (result.starved >= 0).all()
    assert (result.busy + result.blocked + result.starved == result.makespan).all()
    assert (result.makespan >= bound(service)).all()
    if not any(buffers):
        assert not result.blocked.any()
    for unit in range(service.shape[1]):
        works, paths = (service[:, unit].sum(axis).max() for axis in (1, 0))
        assert bound(service)[unit] == max(works, paths)


@given(streams(), st.integers(1, 8), st.integers(0, 20), st.integers(1, 4), st.integers(0, 3), st.integers(1, 64))
def test_slow_memory_never_ends_earlier(
    stream: tuple[np.ndarray, list[int]], width: int, latency: int, banks: int, outstanding: int, burst: int
) -> None:
    """The first station fetches items: at full bandwidth in the scan engine, with all delays in the event engine."""
    service, buffers = stream
    size = 10 * service[0, 0]
    fetched = np.concatenate([-(-size // width)[None, None], service[1:, :1]])
    rest = [StationUnit(service[s, 0], (*buffers, 0)[s]) for s in range(1, len(service))]
    first = StationUnit(np.zeros_like(size), (*buffers, 0)[0], memory="dram", bytes=size)
    scanned = scan(fetched, buffers).end[:, 0]
    at_once = play([first, *rest], [AcceleratorMemory("dram", bandwidth=width)]).end[:, 0]
    assert np.array_equal(at_once, scanned)
    slow = AcceleratorMemory(
        "dram", banks=banks, bandwidth=width, latency=latency, outstanding=outstanding, burst=burst
    )
    waited = play([first, *rest], [slow])
    assert (waited.end[:, 0] >= scanned).all()
    assert waited.makespan[0] >= max(bound(fetched)[0], -(-size.sum() // width))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 3), st.integers(0, 20), st.integers(1, 3))
def test_unlimited_requests_equal_a_very_high_limit(
    seed: int, banks: int, ports: int, latency: int, servers: int
) -> None:
    """Without a limit of requests, a transfer is computed in one step, for a single bank as one burst."""
    random = np.random.default_rng(seed)
    memory = AcceleratorMemory("dram", banks=banks, ports=ports, bandwidth=7.5, latency=latency, burst=16)
    items = 8
    places = [
        StationUnit(random.integers(0, 9, items), 1, servers, memory="dram", bytes=random.integers(0, 90, items))
        for _ in range(2)
    ]
    at_once, one_by_one = (play(places, [replace(memory, outstanding=limit)]) for limit in (0, 10**6))
    for name in ("start", "end", "free"):
        assert np.array_equal(getattr(at_once, name), getattr(one_by_one, name))


@given(streams())
def test_smaller_buffers_are_never_faster(stream: tuple[np.ndarray, list[int]]) -> None:
    service, _ = stream
    spans = [scan(service, [depth] * (len(service) - 1)).makespan for depth in (1, 2, 4, 0)]
    assert all((small >= large).all() for small, large in pairwise(spans))


def test_buffers_block_as_by_hand_calculation() -> None:
    service = np.array([[[1, 1, 1, 1]], [[5, 5, 5, 5]]])
    result = scan(service, [1])
    assert result.start[0, 0].tolist() == [0, 1, 6, 11] and result.start[1, 0].tolist() == [1, 6, 11, 16]
    assert result.blocked[:, 0].tolist() == [8, 0] and result.starved[:, 0].tolist() == [9, 1]
    assert scan(service, [0]).start[0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("outstanding", "expected"), [(1, 10 * 108), (2, 4 * 108 + 116), (0, 10 * 8 + 100)])
def test_requests_in_flight_hide_latency(outstanding: int, expected: int) -> None:
    """Ten bursts of 8 cycles with a latency of 100, at 1, 2 and many requests in flight."""
    memory = AcceleratorMemory("dram", bandwidth=8, latency=100, outstanding=outstanding)
    place = StationUnit(np.zeros(1, int), memory="dram", bytes=np.array([640]))
    assert play([place], [memory]).makespan[0] == expected


def test_bursts_on_one_bank_are_serialized() -> None:
    memory = AcceleratorMemory("dram", banks=4, bandwidth=16, burst=64)
    items, size = np.zeros(4, int), np.full(4, 64)
    spans = [
        play([StationUnit(items, servers=4, memory="dram", bytes=size, banks=np.array(banks))], [memory]).makespan[0]
        for banks in ([0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1])
    ]
    assert spans == [64, 16, 32]


def test_a_port_sends_one_request_a_cycle() -> None:
    def span(ports: int) -> int:
        memory = AcceleratorMemory("dram", banks=8, ports=ports, burst=8)
        return int(
            play([StationUnit(np.zeros(8, int), servers=8, memory="dram", bytes=np.full(8, 8))], [memory]).makespan[0]
        )

    assert (span(2), span(4), span(8)) == (3, 1, 0)  # cycle of the last of 4, 2 or 1 requests


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_free_servers_take_the_next_item(service: list[int], servers: int) -> None:
    free = [0] * servers
    ends = []
    for cycles in service:
        ends.append(heapq.heappop(free) + cycles)
        heapq.heappush(free, ends[-1])
    result = play([StationUnit(np.array(service), servers=servers)])
    assert result.end[0, 0].tolist() == ends
    assert result.starved[0, 0] == servers * max(ends) - sum(service)


def test_windows_let_items_overtake_a_late_one() -> None:
    """Item 0 arrives late. In order, all items wait for item 0. With a window, arrived items are served first."""
    fetching, working = np.array([50, 5, 5, 5]), np.array([10, 10, 10, 10])
    starts = {
        window: play([StationUnit(fetching, servers=2), StationUnit(working, window=window)]).start[1, 0].tolist()
        for window in (1, 2, 4)
    }
    assert starts[1] == [50, 60, 70, 80]
    assert starts[2] == starts[4] == [50, 5, 15, 25]


def test_invalid_streams_are_refused() -> None:
    for service, buffers, message in (
        (np.ones((2, 1, 3)), [1], "integer cycles"),
        (-np.ones((2, 1, 3), int), [1], "integer cycles"),
        (np.ones((2, 1, 3), int), [], "2 stations have 1 buffers"),
        (np.ones((2, 1, 3), int), [-1], "2 stations have 1 buffers"),
    ):
        with pytest.raises(UsageError, match=message):
            scan(service, buffers)
    with pytest.raises(UsageError, match="numbers of items differ"):
        play([StationUnit(np.zeros(2, int)), StationUnit(np.zeros(3, int))])
    with pytest.raises(UsageError, match="memory 'dram', which is not in the list"):
        play([StationUnit(np.zeros(1, int), memory="dram", bytes=np.ones(1))])
