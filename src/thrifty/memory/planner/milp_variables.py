"""Columns of the mixed-integer program: binary choices for one block, and the bytes that each choice stores."""

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
    """Allowed actions for items, and the columns created so far with their costs in seconds."""

    def __init__(
        self, compression: CompressionOption | None, link: OffloadLink | None, allowed: Sequence[TensorAction]
    ):
        self.compression, self.link, self.allowed = compression, link, allowed
        self.cost: list[float] = []

    def column(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def item_columns(self, item: OpOutput) -> dict[TensorAction, int]:
        compression, cost = self.compression, {TensorAction.KEEP: 0.0}
        if item.repeatable:
            cost[TensorAction.RECOMPUTE] = item.seconds
        if item.storable and self.link:
            cost[TensorAction.OFFLOAD] = 0.0
        if item.storable and item.quantizable and compression:
            cost[TensorAction.COMPRESS] = compression.seconds_per_byte * item.bytes
        allowed = [action for action in cost if action in self.allowed or action is TensorAction.KEEP]
        return {action: self.column(cost[action]) for action in allowed}

    def stream_columns(self, sizes: Mapping[TensorAction, int]) -> dict[TensorAction, int]:
        cost = {}
        if self.link and TensorAction.OFFLOAD in self.allowed:
            cost[TensorAction.OFFLOAD] = 0.0
        if self.compression and TensorAction.COMPRESS in self.allowed and TensorAction.COMPRESS in sizes:
            cost[TensorAction.COMPRESS] = self.compression.seconds_per_byte * sizes[TensorAction.COMPRESS]
        return {action: self.column(each) for action, each in cost.items()}


class BlockColumns:
    def __init__(self, options: MilpOptions, block: BlockCosts):
        self.costs, self.tape = block, block.tape
        self.columns = {n: options.item_columns(item) for n, item in self.tape.items.items()}
        self.planned = options.column(block.overhead)
        """Column that is 1 if the block follows a plan."""
        may_be_whole = block.whole is not None and TensorAction.RECOMPUTE in options.allowed
        self.whole = {options.column(block.whole or 0.0): 1.0} if may_be_whole else {}
        """Column that is 1 if the block is recomputed as a whole."""
        self.streams = {n: options.stream_columns(sizes) for n, sizes in block.movable.items()}
        """Columns of the moved tensors of a streamed block, by item and action."""
        self.streamed = options.column(block.streaming) if any(self.streams.values()) else None
        """Column that is 1 if the block is streamed."""
        self.input = options.column(0.0) if options.link and self.tape.movable_input else None
        """Column that is 1 if the input of a planned or wholly recomputed block is offloaded."""

    def stored(self, bits: float) -> tuple[dict[int, float], float]:
        """Return the bytes stored between forward and backward pass: coefficients by column, and a constant."""
        tape = self.tape
        unsaved = sum(tape.items[n].bytes for n in saved_items(tape)) - tape.saved_bytes
        coefficients = {self.planned: float(unsaved)} | dict.fromkeys(self.whole, float(unsaved))
        for number, columns in self.columns.items():
            size = tape.items[number].bytes
            coefficients |= {
                column: stored_bytes(tape, number, size, action, bits) for action, column in columns.items()
            }
        for owner, columns in self.streams.items():
            for action, column in columns.items():
                size = self.costs.movable[owner][action]
                stays = -size if owner == INPUT else tape.items[owner].bytes - size  # inputs already count as stored
                coefficients[column] = stays + stored_bytes(tape, owner, size, action, bits)
        if self.input is not None:
            coefficients[self.input] = -float(tape.movable_input)
        return coefficients, float(tape.input_bytes - unsaved)

    def intervals(self) -> list[tuple[dict[int, float], float]]:
        """Return bytes in addition to stored bytes, for each interval that may contain the peak: coefficients by
        column, and a constant.
        """
        tape, saved = self.tape, self.tape.saved_tensors
        kept = {self.columns[n][TensorAction.KEEP]: -float(tape.items[n].saved_bytes) for n in saved_items(tape)}
        input_back = {} if self.input is None else {self.input: float(tape.movable_input)}
        absent: dict[int, float] = {}  # moved tensors that `always` counts, although they are offloaded
        for number, columns in self.streams.items():
            if number != INPUT:
                absent |= dict.fromkeys(columns.values(), -float(tape.items[number].saved_bytes))
        always, more = float(tape.saved_bytes), max(self.costs.recompute_temporary - self.costs.temporary, 0.0)
        recompute_temporary = {self.planned: more} | dict.fromkeys(self.whole, more)
        rows = [(kept | input_back | absent | recompute_temporary, always + self.costs.temporary)]
        if self.streamed is None:
            return rows
        for interval in self.costs.intervals:
            row = dict(kept | input_back | absent)
            for place in interval.here:
                for action, column in self.streams.get(saved[place].owner, {}).items():
                    if action is TensorAction.OFFLOAD or not saved[place].is_small:
                        row[column] = row.get(column, 0.0) + saved[place].bytes
            rows.append((row, always + interval.bytes))
            nearer: list[int] = []
            for place in interval.next:
                carried = self.streams.get(saved[place].owner, {}).get(TensorAction.OFFLOAD)
                if carried is None or carried in nearer:
                    continue
                if place not in interval.here:  # in transfer if no earlier tensor in the order is offloaded
                    size = float(saved[place].bytes)
                    in_transfer = dict(row)
                    for column, change in [(carried, size), *((each, -size) for each in nearer)]:
                        in_transfer[column] = in_transfer.get(column, 0.0) + change
                    rows.append((in_transfer, always + interval.bytes))
                nearer.append(carried)
        return rows

    def returning(self) -> dict[int, float]:
        """Return the bytes that may return during the backward pass of the next block, by column."""
        coefficients = {
            columns[TensorAction.OFFLOAD]: float(self.tape.items[n].bytes)
            for n, columns in self.columns.items()
            if TensorAction.OFFLOAD in columns
        }
        return coefficients if self.input is None else coefficients | {self.input: float(self.tape.movable_input)}

    def moved(self) -> dict[int, float]:
        """Return the bytes that the link transfers, by column."""
        streamed = [
            (columns[TensorAction.OFFLOAD], self.costs.movable[n])
            for n, columns in self.streams.items()
            if TensorAction.OFFLOAD in columns
        ]
        return self.returning() | {column: float(sizes[TensorAction.OFFLOAD]) for column, sizes in streamed}

    def chosen(self, x: np.ndarray) -> dict[int, TensorAction]:
        moved = {INPUT: TensorAction.OFFLOAD} if self.input is not None and x[self.input] > 0.5 else {}
        if any(x[column] > 0.5 for column in self.whole):
            return dict.fromkeys(self.tape.items, TensorAction.RECOMPUTE) | moved
        needed = self.tape.items if x[self.planned] > 0.5 else saved_items(self.tape)
        choices = [*((n, self.columns[n]) for n in needed), *self.streams.items()]
        return {n: action for n, columns in choices for action, column in columns.items() if x[column] > 0.5} | moved
