"""The columns of a program that decides what happens to saved tensors: what may be chosen for one block, and what each
choice stores. Each is 0 or 1."""

from collections.abc import Mapping, Sequence

import numpy as np

from thrifty.memory.op_trace import INPUT, OpOutput
from thrifty.memory.planner.memory_plan import (
    BlockCosts,
    CompressionOption,
    OffloadLink,
    TensorAction,
    saved_items,
    stored_bytes,
)


class MilpOptions:
    """What may happen to items, and the columns made so far with their costs in seconds."""

    def __init__(
        self, compression: CompressionOption | None, link: OffloadLink | None, allowed: Sequence[TensorAction]
    ):
        self.compression, self.link, self.allowed = compression, link, allowed
        self.cost: list[float] = []

    def column(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def ways_of(self, item: OpOutput) -> dict[TensorAction, int]:
        compression, cost = self.compression, {TensorAction.KEEP: 0.0}
        if item.repeatable:
            cost[TensorAction.RECOMPUTE] = item.seconds
        if item.storable and self.link:
            cost[TensorAction.OFFLOAD] = 0.0
        if item.storable and item.codable and compression:
            cost[TensorAction.COMPRESS] = compression.seconds_per_byte * item.bytes
        allowed = [way for way in cost if way in self.allowed or way is TensorAction.KEEP]
        return {way: self.column(cost[way]) for way in allowed}

    def ways_elsewhere(self, sizes: Mapping[TensorAction, int]) -> dict[TensorAction, int]:
        cost = {}
        if self.link and TensorAction.OFFLOAD in self.allowed:
            cost[TensorAction.OFFLOAD] = 0.0
        if self.compression and TensorAction.COMPRESS in self.allowed and TensorAction.COMPRESS in sizes:
            cost[TensorAction.COMPRESS] = self.compression.seconds_per_byte * sizes[TensorAction.COMPRESS]
        return {way: self.column(each) for way, each in cost.items()}


class BlockColumns:
    """The columns of one block."""

    def __init__(self, offers: MilpOptions, block: BlockCosts):
        self.costs, self.tape = block, block.tape
        self.ways = {n: offers.ways_of(item) for n, item in self.tape.items.items()}
        self.planned = offers.column(block.overhead)
        """Whether it follows a plan at all."""
        may_be_whole = block.whole is not None and TensorAction.RECOMPUTE in offers.allowed
        self.whole = {offers.column(block.whole or 0.0): 1.0} if may_be_whole else {}
        """Whether it is made again as a whole."""
        self.away = {n: offers.ways_elsewhere(sizes) for n, sizes in block.movable.items()}
        """What waits elsewhere of a block that is streamed."""
        self.streamed = offers.column(block.streaming) if any(self.away.values()) else None
        """Whether it is streamed."""
        self.input = offers.column(0.0) if offers.link and self.tape.movable_input else None
        """Whether the input of a block that is planned or made again as a whole waits elsewhere."""

    def stored(self, bits: float) -> tuple[dict[int, float], float]:
        """By column, bytes that are there from its forward to its backward pass; and those that are in any case."""
        tape = self.tape
        beside = sum(tape.items[n].bytes for n in saved_items(tape)) - tape.saved_bytes
        coefficients = {self.planned: float(beside)} | dict.fromkeys(self.whole, float(beside))
        for number, ways in self.ways.items():
            size = tape.items[number].bytes
            coefficients |= {column: stored_bytes(tape, number, size, way, bits) for way, column in ways.items()}
        for owner, ways in self.away.items():
            for way, column in ways.items():
                size = self.costs.movable[owner][way]
                stays = -size if owner == INPUT else tape.items[owner].bytes - size  # an input is there in any case
                coefficients[column] = stays + stored_bytes(tape, owner, size, way, bits)
        if self.input is not None:
            coefficients[self.input] = -float(tape.movable_input)
        return coefficients, float(tape.input_bytes - beside)

    def moments(self) -> list[tuple[dict[int, float], float]]:
        """For each moment at which its peak may be, bytes beside what is stored: by column, and in any case."""
        tape, handed = self.tape, self.tape.handed
        again = {self.ways[n][TensorAction.KEEP]: -float(tape.items[n].saved_bytes) for n in saved_items(tape)}
        back = {} if self.input is None else {self.input: float(tape.movable_input)}
        absent: dict[int, float] = {}  # counted with all that is not kept, though it is elsewhere
        for number, ways in self.away.items():
            if number != INPUT:
                absent |= dict.fromkeys(ways.values(), -float(tape.items[number].saved_bytes))
        always, more = float(tape.saved_bytes), max(self.costs.making - self.costs.temporary, 0.0)
        making = {self.planned: more} | dict.fromkeys(self.whole, more)
        rows = [(again | back | absent | making, always + self.costs.temporary)]
        if self.streamed is None:
            return rows
        for moment in self.costs.moments:
            row = dict(again | back | absent)
            for place in moment.here:
                for way, column in self.away.get(handed[place].owner, {}).items():
                    if way is TensorAction.OFFLOAD or not handed[place].is_small:
                        row[column] = row.get(column, 0.0) + handed[place].bytes
            rows.append((row, always + moment.bytes))
            nearer: list[int] = []
            for place in moment.next:
                carried = self.away.get(handed[place].owner, {}).get(TensorAction.OFFLOAD)
                if carried is None or carried in nearer:
                    continue
                if place not in moment.here:  # underway, if none that is nearer is carried
                    size = float(handed[place].bytes)
                    underway = dict(row)
                    for column, share in [(carried, size), *((each, -size) for each in nearer)]:
                        underway[column] = underway.get(column, 0.0) + share
                    rows.append((underway, always + moment.bytes))
                nearer.append(carried)
        return rows

    def coming(self) -> dict[int, float]:
        """By column, bytes that may come back while the block behind it is still at work."""
        coefficients = {
            ways[TensorAction.OFFLOAD]: float(self.tape.items[n].bytes)
            for n, ways in self.ways.items()
            if TensorAction.OFFLOAD in ways
        }
        return coefficients if self.input is None else coefficients | {self.input: float(self.tape.movable_input)}

    def moved(self) -> dict[int, float]:
        """By column, bytes that go over the link."""
        away = [
            (ways[TensorAction.OFFLOAD], self.costs.movable[n])
            for n, ways in self.away.items()
            if TensorAction.OFFLOAD in ways
        ]
        return self.coming() | {column: float(sizes[TensorAction.OFFLOAD]) for column, sizes in away}

    def chosen(self, x: np.ndarray) -> dict[int, TensorAction]:
        """The ways that a solution stands for."""
        moved = {INPUT: TensorAction.OFFLOAD} if self.input is not None and x[self.input] > 0.5 else {}
        if any(x[column] > 0.5 for column in self.whole):
            return dict.fromkeys(self.tape.items, TensorAction.RECOMPUTE) | moved
        needed = self.tape.items if x[self.planned] > 0.5 else saved_items(self.tape)
        columns = [*((n, self.ways[n]) for n in needed), *self.away.items()]
        return {n: way for n, ways in columns for way, column in ways.items() if x[column] > 0.5} | moved
