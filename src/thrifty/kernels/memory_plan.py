"""Which saved tensor is kept, compressed, offloaded or made again, so that a step is fastest within a budget of bytes.

One mixed-integer program over all blocks, solved by HiGHS. For each item of a block's tape at most one of the ways
holds; what autograd saves needs one, and what an item that is made again is made from needs an exact one. Or a whole
block is made again at once, as recompute does, which costs less than to follow its operations one by one. The program
of Checkmate (Jain et al. 2020, arXiv 1910.02653), with compression and with offload under a link's bandwidth (after
Beaumont et al. 2021, and Patil et al. 2022, arXiv 2207.07697) as further ways.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from thrifty.core.activations.tape import Item, Tape


class Way(Enum):
    KEEP = "keep"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class BlockCosts:
    """One call of a block."""

    tape: Tape
    temporary: float
    """Bytes that its backward pass needs beside what is saved."""
    overhead: float
    """Seconds that following a plan costs, whatever the plan."""
    forward: float
    backward: float
    """Seconds of computing during which a link may carry something."""
    whole: float | None = None
    """Seconds to make all of the call again at once, with no plan to follow; None where that cannot be."""


@dataclass(frozen=True)
class Compression:
    bits: float
    """Stored for each number, metadata included."""
    seconds_per_byte: float
    """To encode and to decode."""


@dataclass(frozen=True)
class Link:
    bytes_per_second: float
    """One way; both ways may be in use at once, each during its own pass."""


@dataclass(frozen=True)
class MemoryPlan:
    ways: tuple[Mapping[int, Way], ...]
    """For each block what happens to which item; an item that is missing is not needed."""
    seconds: float
    """What a step takes longer than one that keeps everything."""
    peak: float
    """Bytes, by the program's own account."""
    gap: float
    """How far, relative to it, the best plan could be below `seconds`."""


def peak_when_kept(blocks: Sequence[BlockCosts]) -> float:
    """Bytes at the peak when everything that is saved is kept."""
    return peak_of_ways(blocks, [{item: Way.KEEP for item in _saved(block.tape)} for block in blocks])


def least_peak(blocks: Sequence[BlockCosts]) -> float:
    """Bytes at the peak when everything that can be is made again: no budget can be below."""
    way = {True: Way.RECOMPUTE, False: Way.KEEP}
    return peak_of_ways(
        blocks, [{n: way[block.tape.items[n].repeatable] for n in _saved(block.tape)} for block in blocks]
    )


def fastest_plan(
    blocks: Sequence[BlockCosts],
    budget: float,
    compression: Compression | None = None,
    link: Link | None = None,
    ways: Sequence[Way] = tuple(Way),
    time_limit: float = 20.0,
    gap: float = 0.005,
) -> MemoryPlan | None:
    """The plan with the least extra seconds whose peak is within the budget; None where there is none.

    Optimal within the relative `gap`, or the best that was found in `time_limit` seconds: the plan says how far it may
    be from the best.
    """
    program = _Program(blocks, compression, link, ways)
    found = program.solve(budget, time_limit, gap)
    if found is None:
        return None
    chosen, seconds, distance = found
    return MemoryPlan(tuple(chosen), seconds, peak_of_ways(blocks, chosen, program.bits), distance)


def is_whole(block: BlockCosts, ways: Mapping[int, Way]) -> bool:
    """Whether a block with these ways is made again all at once: nothing of it is stored, nothing is left out."""
    return block.whole is not None and bool(ways) and all(ways.get(n) is Way.RECOMPUTE for n in block.tape.items)


@contextmanager
def _silence() -> Iterator[None]:
    """HiGHS prints some lines whatever it is told; standard output may be one JSON document."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _saved(tape: Tape) -> list[int]:
    return [number for number, item in tape.items.items() if item.saved]


def peak_of_ways(blocks: Sequence[BlockCosts], chosen: Sequence[Mapping[int, Way]], bits: float = 0.0) -> float:
    """At the backward pass of each block: what all blocks up to it have stored, and all that it saves."""
    stored, peak, coming = 0.0, 0.0, 0.0
    for block, ways in zip(blocks, chosen, strict=True):
        items = block.tape.items
        again = sum(items[n].saved_bytes for n in _saved(block.tape) if ways[n] is not Way.KEEP)
        planned = sum(_stored_bytes(items[n], way, bits) for n, way in ways.items())
        stored += block.tape.input_bytes + (planned if again else block.tape.saved_bytes)
        peak = max(peak, stored + again + block.temporary + coming)
        coming = sum(items[n].bytes for n, way in ways.items() if way is Way.OFFLOAD)
    return peak


def _beside_saved(tape: Tape) -> int:
    """Bytes that a plan stores with what is saved, because it stores all results of an operation or none."""
    return sum(tape.items[number].bytes for number in _saved(tape)) - tape.saved_bytes


def _stored_bytes(item: Item, way: Way, bits: float) -> float:
    if way is Way.COMPRESS:
        return item.bytes / item.itemsize * bits / 8
    return item.bytes if way is Way.KEEP else 0.0


class _Program:
    """Columns: for each block and item its ways, then for each block whether it follows a plan at all, then for some
    whether they are made again as a whole, then the seconds that either pass waits for the link."""

    def __init__(
        self,
        blocks: Sequence[BlockCosts],
        compression: Compression | None,
        link: Link | None,
        ways: Sequence[Way],
    ):
        self.blocks, self.compression, self.link = blocks, compression, link
        self.bits = compression.bits if compression else 0.0
        self.allowed = [way for way in Way if way in ways]
        self.cost: list[float] = []
        self.columns: list[dict[int, dict[Way, int]]] = []
        for block in blocks:
            self.columns.append({n: self._ways_of(item) for n, item in block.tape.items.items()})
        self.planned = [self._column(block.overhead) for block in blocks]
        self.whole = {
            place: self._column(block.whole)
            for place, block in enumerate(blocks)
            if block.whole is not None and Way.RECOMPUTE in self.allowed
        }
        self.waits = [self._column(1.0), self._column(1.0)] if link else []
        self.rows: list[dict[int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def solve(self, budget: float, time_limit: float, gap: float) -> tuple[list[dict[int, Way]], float, float] | None:
        self._needs()
        self._link()
        self._memory(budget)
        count, cost = len(self.cost), np.array(self.cost)
        unit = cost.mean() or 1.0  # the solver's tolerances are absolute
        whole = np.ones(count)
        whole[self.waits] = 0
        upper = np.ones(count)
        upper[self.waits] = np.inf
        with _silence():
            found = milp(
                cost / unit,
                constraints=LinearConstraint(self._matrix(), self.lower, self.upper),
                integrality=whole,
                bounds=Bounds(np.zeros(count), upper),
                options={"time_limit": time_limit, "mip_rel_gap": gap},
            )
        if found.x is None:
            return None
        return self._chosen(found.x), float(found.fun) * unit, float(found.mip_gap or 0.0)

    def _column(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _ways_of(self, item: Item) -> dict[Way, int]:
        compression, cost = self.compression, {Way.KEEP: 0.0}
        if item.repeatable:
            cost[Way.RECOMPUTE] = item.seconds
        if item.storable and self.link:
            cost[Way.OFFLOAD] = 0.0
        if item.storable and item.floating and compression:
            cost[Way.COMPRESS] = compression.seconds_per_byte * item.bytes
        allowed = [way for way in cost if way in self.allowed or way is Way.KEEP]
        return {way: self._column(cost[way]) for way in allowed}

    def _needs(self) -> None:
        for place, (block, columns, planned) in enumerate(zip(self.blocks, self.columns, self.planned, strict=True)):
            whole = {self.whole[place]: 1.0} if place in self.whole else {}
            for number, item in block.tape.items.items():
                ways = columns[number]
                held = {column: 1.0 for column in ways.values()}
                self._row(held | whole, 1.0 if item.saved else 0.0, 1.0)
                if item.saved:
                    self._row({ways[Way.KEEP]: 1.0, planned: 1.0} | whole, 1.0, np.inf)
                if not item.storable:  # autograd itself can keep it, where nothing is planned
                    self._row({ways[Way.KEEP]: 1.0, planned: 1.0}, 0.0, 1.0)
                if Way.RECOMPUTE not in ways:
                    continue
                for source in item.reads:
                    # made from codes it would not be the expectation of anything
                    exact = {column: 1.0 for way, column in columns[source].items() if way is not Way.COMPRESS}
                    self._row({**exact, ways[Way.RECOMPUTE]: -1.0}, 0.0, np.inf)

    def _link(self) -> None:
        if self.link is None:
            return
        moved = {
            ways[Way.OFFLOAD]: block.tape.items[number].bytes / self.link.bytes_per_second
            for block, columns in zip(self.blocks, self.columns, strict=True)
            for number, ways in columns.items()
            if Way.OFFLOAD in ways
        }
        passes = (sum(block.forward for block in self.blocks), sum(block.backward for block in self.blocks))
        for wait, seconds in zip(self.waits, passes, strict=True):
            self._row({**moved, wait: -1.0}, -np.inf, seconds)

    def _memory(self, budget: float) -> None:
        stored: dict[int, float] = {}
        coming: dict[int, float] = {}
        inputs = 0.0
        for place, (block, columns, planned) in enumerate(zip(self.blocks, self.columns, self.planned, strict=True)):
            beside = _beside_saved(block.tape)
            inputs += block.tape.input_bytes - beside
            stored[planned] = beside
            if place in self.whole:
                stored[self.whole[place]] = beside
            again: dict[int, float] = {}
            offloaded: dict[int, float] = {}
            for number, ways in columns.items():
                item = block.tape.items[number]
                stored |= {column: _stored_bytes(item, way, self.bits) for way, column in ways.items()}
                if item.saved:
                    again[ways[Way.KEEP]] = -float(item.saved_bytes)
                if Way.OFFLOAD in ways:
                    offloaded[ways[Way.OFFLOAD]] = float(item.bytes)
            row = {column: stored.get(column, 0.0) + again.get(column, 0.0) for column in stored | again}
            left = budget - inputs - block.tape.saved_bytes - block.temporary
            self._row({column: value / budget for column, value in (row | coming).items()}, -np.inf, left / budget)
            coming = offloaded

    def _row(self, entries: Mapping[int, float], lower: float, upper: float) -> None:
        self.rows.append({column: value for column, value in entries.items() if value})
        self.lower.append(lower)
        self.upper.append(upper)

    def _matrix(self) -> coo_array:
        entries = [(row, column, value) for row, each in enumerate(self.rows) for column, value in each.items()]
        rows, columns, values = zip(*entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.cost))).tocsr()

    def _chosen(self, x: np.ndarray) -> list[dict[int, Way]]:
        again = {place for place, column in self.whole.items() if x[column] > 0.5}
        return [
            dict.fromkeys(columns, Way.RECOMPUTE)
            if place in again
            else {n: way for n, ways in columns.items() for way, column in ways.items() if x[column] > 0.5}
            for place, columns in enumerate(self.columns)
        ]
