"""What happens to each saved tensor between the forward and the backward pass, and what that holds at the peak.

A block is plain (autograd keeps what it saves), streamed (some of it waits elsewhere and comes back tensor by tensor),
planned (those of its operations that are needed run again before its backward pass), or made again as a whole.
Which one it is follows from what is decided for its items. `memory_milp.py` and `chain_plan.py` find plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from thrifty.memory.block_costs import in_seconds
from thrifty.memory.dry_run import BlockMemory
from thrifty.memory.op_trace import INPUT, OpTrace
from thrifty.memory.peak_intervals import PeakInterval
from thrifty.memory.recompute_schedule import ChainStageCost, RecomputeSchedule


class TensorAction(Enum):
    KEEP = "keep"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


Ways = Mapping[int, TensorAction]
"""Of one block, by item, or by `INPUT` where that does not stay; an item that is missing is not needed."""


@dataclass(frozen=True)
class BlockCosts:
    """One call of a block."""

    tape: OpTrace
    temporary: float
    """Bytes that its backward pass needs beside what is saved."""
    overhead: float
    """Seconds that following a plan costs, whatever the plan."""
    forward: float
    backward: float
    """Seconds of computing during which a link may carry something."""
    whole: float | None = None
    """Seconds to make all of the call again at once, with no plan to follow; None where that cannot be."""
    stage: ChainStageCost | None = None
    """The same call as part of a chain, in seconds; None where a chain cannot have it."""
    making: float = 0.0
    """Bytes beside what is saved while that is made again, with the gradient of the result already there."""
    moments: Sequence[PeakInterval] = ()
    """What it holds, moment by moment, while what it saves comes back tensor by tensor; () where it cannot."""
    streaming: float = 0.0
    """Seconds that this costs, whatever waits elsewhere."""

    @cached_property
    def movable(self) -> Mapping[int, Mapping[TensorAction, int]]:
        """Of each item, and of the input, the ways to wait elsewhere without a plan to follow, and bytes that do so."""
        sizes: dict[int, dict[TensorAction, int]] = {}
        for owner, size, is_small in self.tape.handed if self.moments else ():
            if owner is None:
                continue
            ways = sizes.setdefault(owner, {TensorAction.OFFLOAD: 0})
            ways[TensorAction.OFFLOAD] += size
            if not is_small and (owner == INPUT or self.tape.items[owner].codable):
                ways[TensorAction.COMPRESS] = ways.get(TensorAction.COMPRESS, 0) + size
        return sizes


def costs_of(tape: OpTrace, memory: BlockMemory, overheads: tuple[float, float]) -> BlockCosts:
    """What a call of a block costs in each way, from seconds of Python for each operation."""
    one_by_one, as_a_whole = (each * len(tape.operations) for each in overheads)
    forward = sum(item.seconds for item in tape.items.values())
    repeatable = not tape.outside and all(item.repeatable for item in tape.items.values())
    stage = in_seconds(memory.stage, forward + as_a_whole) if memory.stage and repeatable else None
    again = forward + as_a_whole if stage is None else stage.stopped
    return BlockCosts(
        tape,
        max([memory.temporary, *(moment.bytes for moment in memory.moments)]),
        one_by_one,
        forward,
        2 * forward,
        whole=again if repeatable else None,
        stage=stage,
        making=memory.stage.saved + memory.stage.keeping + memory.stage.output - tape.saved_bytes
        if memory.stage
        else 0.0,
        moments=memory.moments,
        streaming=overheads[1] * len(tape.handed),
    )


@dataclass(frozen=True)
class CompressionOption:
    bits: float
    """Stored for each number, metadata included."""
    seconds_per_byte: float
    """To encode and to decode."""


@dataclass(frozen=True)
class OffloadLink:
    bytes_per_second: float
    """One way; both ways may be in use at once, each during its own pass."""


@dataclass(frozen=True)
class MemoryPlan:
    ways: tuple[Ways, ...]
    """For each block."""
    seconds: float
    """What a step takes longer than one that keeps everything."""
    peak: float
    """Bytes, by the account of whoever made the plan."""
    gap: float
    """How far, relative to it, the best plan of its kind could be below `seconds`."""
    schedule: RecomputeSchedule | None = None
    """Of a plan for the chain as a whole, what its blocks follow instead of `ways`."""
    instead_of: float | None = None
    """`seconds` of the plan of the other kind, where one fits too."""


def peak_when_kept(blocks: Sequence[BlockCosts]) -> float:
    """Bytes at the peak when everything that is saved is kept."""
    return peak_of_ways(blocks, [dict.fromkeys(saved_items(block.tape), TensorAction.KEEP) for block in blocks])


def peak_when_made_again(blocks: Sequence[BlockCosts], inputs: TensorAction = TensorAction.KEEP) -> float:
    """Bytes at the peak when everything that can be is made again, block by block, from inputs kept in some way."""
    way = {True: TensorAction.RECOMPUTE, False: TensorAction.KEEP}
    ways = [{n: way[block.tape.items[n].repeatable] for n in saved_items(block.tape)} for block in blocks]
    if inputs is not TensorAction.KEEP:
        ways = [
            each | ({INPUT: inputs} if block.tape.movable_input else {})
            for each, block in zip(ways, blocks, strict=True)
        ]
    return peak_of_ways(blocks, ways)


def peak_when_streamed(blocks: Sequence[BlockCosts], way: TensorAction, bits: float = 0.0) -> float:
    """Bytes at the peak when everything that can wait elsewhere does, without any plan to follow."""
    ways = [
        dict.fromkeys(saved_items(block.tape), TensorAction.KEEP)
        | {n: way for n, sizes in block.movable.items() if way in sizes}
        for block in blocks
    ]
    return peak_of_ways(blocks, ways, bits)


def is_whole(block: BlockCosts, ways: Ways) -> bool:
    """Whether a block with these ways is made again all at once: nothing of it is stored, nothing is left out."""
    return (
        block.whole is not None and bool(ways) and all(ways.get(n) is TensorAction.RECOMPUTE for n in block.tape.items)
    )


def is_streamed(block: BlockCosts, ways: Ways) -> bool:
    """Whether what does not stay comes back by itself: nothing is made again."""
    elsewhere = [way for way in ways.values() if way is not TensorAction.KEEP]
    return bool(block.moments and elsewhere) and TensorAction.RECOMPUTE not in elsewhere


def saved_items(tape: OpTrace) -> list[int]:
    return [number for number, item in tape.items.items() if item.saved]


def peak_of_ways(blocks: Sequence[BlockCosts], chosen: Sequence[Ways], bits: float = 0.0) -> float:
    """At the backward pass of each block: what all blocks up to it have stored, and what it needs beside that."""
    stored, peak, coming = 0.0, 0.0, 0.0
    for block, ways in zip(blocks, chosen, strict=True):
        tape, moved = block.tape, ways.get(INPUT)
        stored += tape.input_bytes
        if moved is not None:
            stored += stored_bytes(tape, INPUT, tape.movable_input, moved, bits) - tape.movable_input
        if is_streamed(block, ways):
            stored += _streamed_bytes(block, ways, bits)
            peak = max(peak, stored + _streamed_beside(block, ways) + coming)
            coming = 0.0
            continue
        again = sum(tape.items[n].saved_bytes for n in saved_items(tape) if ways[n] is not TensorAction.KEEP)
        sizes = {n: tape.items[n].bytes for n in ways if n != INPUT}
        planned = sum(stored_bytes(tape, n, size, ways[n], bits) for n, size in sizes.items())
        stored += planned if again else tape.saved_bytes
        back = tape.movable_input if moved else 0
        beside = max(block.temporary, block.making) if again else block.temporary
        peak = max(peak, stored + again + back + beside + coming)
        coming = back + sum(size for n, size in sizes.items() if ways[n] is TensorAction.OFFLOAD)
    return peak


def stored_bytes(tape: OpTrace, number: int, size: float, way: TensorAction, bits: float) -> float:
    """What stays on the device of so many bytes of an item, or of the input; what is drawn takes one bit in codes."""
    if way is not TensorAction.COMPRESS:
        return size if way is TensorAction.KEEP else 0.0
    item = tape.items.get(number)
    if item is None:
        return size / tape.input_itemsize * bits / 8
    return size / item.itemsize * (1 if item.drawn else bits) / 8


def _streamed_bytes(block: BlockCosts, ways: Ways, bits: float) -> float:
    """Stored of what a streamed block saves."""
    stored = float(block.tape.saved_bytes)
    for number, sizes in block.movable.items():
        if number != INPUT and (size := sizes.get(ways[number])):
            stored += stored_bytes(block.tape, number, size, ways[number], bits) - size
    return stored


def _streamed_beside(block: BlockCosts, ways: Ways) -> float:
    """The most that a streamed block holds beside what it stores."""
    handed = block.tape.handed
    way_of = [TensorAction.KEEP if each.owner is None else ways.get(each.owner, TensorAction.KEEP) for each in handed]
    carried = {place for place, way in enumerate(way_of) if way is TensorAction.OFFLOAD}
    elsewhere = carried | {p for p, way in enumerate(way_of) if way is TensorAction.COMPRESS and not handed[p].is_small}
    most = block.temporary
    for moment in block.moments:
        here = sum(handed[place].bytes for place in moment.here & elsewhere)
        underway = next((place for place in moment.next if place in carried), None)
        more = 0 if underway is None or underway in moment.here else handed[underway].bytes
        most = max(most, moment.bytes + here + more)
    return most
