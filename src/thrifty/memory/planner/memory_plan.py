"""Memory plan: the action for each saved tensor between forward and backward pass, and the resulting peak.

The actions for a block's items determine the kind of the block. A plain block keeps the tensors that autograd saves. In
a streamed block, some saved tensors are offloaded and return one by one. In a planned block, required operations run
again before the backward pass. Other blocks are recomputed as a whole. `memory_milp.py` and `chain_plan.py` compute
plans.
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


BlockActions = Mapping[int, TensorAction]
"""Actions for one block by item number, or by `INPUT` for an offloaded input. An item without an action is unused."""


@dataclass(frozen=True)
class BlockCosts:
    tape: OpTrace
    temporary: float
    """Peak bytes of the backward pass in addition to saved tensors."""
    overhead: float
    """Extra seconds of any plan, whatever it stores."""
    forward: float
    backward: float
    """Seconds of backward computation, during which a link may transfer."""
    whole: float | None = None
    """Seconds to recompute the whole call at once. None if that is not possible."""
    stage: ChainStageCost | None = None
    """Cost of the call as a stage of a chain, in seconds. None if a chain cannot contain the call."""
    recompute_temporary: float = 0.0
    """Temporary bytes during recomputation of saved tensors, including the gradient of the result."""
    intervals: Sequence[PeakInterval] = ()
    """Peak intervals if saved tensors return one by one. () if the block cannot be streamed."""
    streaming: float = 0.0
    """Extra seconds of streaming, whatever tensors are streamed."""

    @cached_property
    def movable(self) -> Mapping[int, Mapping[TensorAction, int]]:
        """Bytes of each item, and of the input, that can be quantized or offloaded without recomputation, by action."""
        sizes: dict[int, dict[TensorAction, int]] = {}
        for owner, size, is_small in self.tape.saved_tensors if self.intervals else ():
            if owner is None:
                continue
            sizes_by_action = sizes.setdefault(owner, {TensorAction.OFFLOAD: 0})
            sizes_by_action[TensorAction.OFFLOAD] += size
            if not is_small and (owner == INPUT or self.tape.items[owner].quantizable):
                sizes_by_action[TensorAction.COMPRESS] = sizes_by_action.get(TensorAction.COMPRESS, 0) + size
        return sizes


def costs_of(tape: OpTrace, memory: BlockMemory, overheads: tuple[float, float]) -> BlockCosts:
    """Return the costs of a block call. `overheads` are the Python seconds per operation of a planned and a whole
    recomputation.
    """
    one_by_one, as_a_whole = (each * len(tape.operations) for each in overheads)
    forward = sum(item.seconds for item in tape.items.values())
    repeatable = not tape.outside and all(item.repeatable for item in tape.items.values())
    stage = in_seconds(memory.stage, forward + as_a_whole) if memory.stage and repeatable else None
    again = forward + as_a_whole if stage is None else stage.stopped
    return BlockCosts(
        tape,
        max([memory.temporary, *(interval.bytes for interval in memory.intervals)]),
        one_by_one,
        forward,
        2 * forward,
        whole=again if repeatable else None,
        stage=stage,
        recompute_temporary=memory.stage.saved + memory.stage.keeping + memory.stage.output - tape.saved_bytes
        if memory.stage
        else 0.0,
        intervals=memory.intervals,
        streaming=overheads[1] * len(tape.saved_tensors),
    )


@dataclass(frozen=True)
class CompressionOption:
    bits: float
    """Stored bits per element, including metadata."""
    seconds_per_byte: float
    """Seconds per byte to quantize and dequantize."""


@dataclass(frozen=True)
class OffloadLink:
    bytes_per_second: float
    """Bandwidth of one direction. Each pass uses one direction."""


@dataclass(frozen=True)
class MemoryPlan:
    actions: tuple[BlockActions, ...]
    seconds: float
    """Extra seconds of a step compared with keeping all tensors."""
    peak: float
    """Predicted peak bytes."""
    gap: float
    """Upper bound of the relative distance of `seconds` from the best plan of this kind."""
    schedule: RecomputeSchedule | None = None
    """Schedule of a plan for whole blocks. It replaces `actions`."""
    other_seconds: float | None = None
    """`seconds` of the plan of the other kind (single tensors or whole blocks), if it also fits."""


def peak_when_kept(blocks: Sequence[BlockCosts]) -> float:
    """Return the peak bytes if all saved tensors are kept."""
    return plan_peak(blocks, [dict.fromkeys(saved_items(block.tape), TensorAction.KEEP) for block in blocks])


def peak_when_recomputed(blocks: Sequence[BlockCosts], inputs: TensorAction = TensorAction.KEEP) -> float:
    """Return the peak bytes if all repeatable items are recomputed block by block, with action `inputs` for inputs."""
    action = {True: TensorAction.RECOMPUTE, False: TensorAction.KEEP}
    actions = [{n: action[block.tape.items[n].repeatable] for n in saved_items(block.tape)} for block in blocks]
    if inputs is not TensorAction.KEEP:
        actions = [
            each | ({INPUT: inputs} if block.tape.movable_input else {})
            for each, block in zip(actions, blocks, strict=True)
        ]
    return plan_peak(blocks, actions)


def peak_when_streamed(blocks: Sequence[BlockCosts], action: TensorAction, bits: float = 0.0) -> float:
    """Return the peak bytes if all movable items have `action` and nothing is recomputed."""
    actions = [
        dict.fromkeys(saved_items(block.tape), TensorAction.KEEP)
        | {n: action for n, sizes in block.movable.items() if action in sizes}
        for block in blocks
    ]
    return plan_peak(blocks, actions, bits)


def is_whole(block: BlockCosts, actions: BlockActions) -> bool:
    """Return True if the actions recompute the whole block at once: no item is stored and no item is unused."""
    return (
        block.whole is not None
        and bool(actions)
        and all(actions.get(n) is TensorAction.RECOMPUTE for n in block.tape.items)
    )


def is_streamed(block: BlockCosts, actions: BlockActions) -> bool:
    """Return True if moved tensors return one by one and nothing is recomputed."""
    moved = [action for action in actions.values() if action is not TensorAction.KEEP]
    return bool(block.intervals and moved) and TensorAction.RECOMPUTE not in moved


def saved_items(tape: OpTrace) -> list[int]:
    return [number for number, item in tape.items.items() if item.saved]


def plan_peak(blocks: Sequence[BlockCosts], chosen: Sequence[BlockActions], bits: float = 0.0) -> float:
    """Return the peak over all backward passes: bytes stored by all blocks so far, plus the block's temporary bytes."""
    stored, peak, returning = 0.0, 0.0, 0.0
    for block, actions in zip(blocks, chosen, strict=True):
        tape, moved = block.tape, actions.get(INPUT)
        stored += tape.input_bytes
        if moved is not None:
            stored += stored_bytes(tape, INPUT, tape.movable_input, moved, bits) - tape.movable_input
        if is_streamed(block, actions):
            stored += _streamed_bytes(block, actions, bits)
            peak = max(peak, stored + _streamed_temporary(block, actions) + returning)
            returning = 0.0
            continue
        recomputed = sum(tape.items[n].saved_bytes for n in saved_items(tape) if actions[n] is not TensorAction.KEEP)
        sizes = {n: tape.items[n].bytes for n in actions if n != INPUT}
        planned = sum(stored_bytes(tape, n, size, actions[n], bits) for n, size in sizes.items())
        stored += planned if recomputed else tape.saved_bytes
        input_back = tape.movable_input if moved else 0
        temporary = max(block.temporary, block.recompute_temporary) if recomputed else block.temporary
        peak = max(peak, stored + recomputed + input_back + temporary + returning)
        returning = input_back + sum(size for n, size in sizes.items() if actions[n] is TensorAction.OFFLOAD)
    return peak


def stored_bytes(tape: OpTrace, number: int, size: float, action: TensorAction, bits: float) -> float:
    """Return the bytes of an item or of the input on the device. A dropout mask is quantized to one bit per element."""
    if action is not TensorAction.COMPRESS:
        return size if action is TensorAction.KEEP else 0.0
    item = tape.items.get(number)
    if item is None:
        return size / tape.input_itemsize * bits / 8
    return size / item.itemsize * (1 if item.is_dropout_mask else bits) / 8


def _streamed_bytes(block: BlockCosts, actions: BlockActions, bits: float) -> float:
    stored = float(block.tape.saved_bytes)
    for number, sizes in block.movable.items():
        if number != INPUT and (size := sizes.get(actions[number])):
            stored += stored_bytes(block.tape, number, size, actions[number], bits) - size
    return stored


def _streamed_temporary(block: BlockCosts, actions: BlockActions) -> float:
    """Return the peak bytes of a streamed block in addition to its stored bytes."""
    saved = block.tape.saved_tensors
    action_of = [
        TensorAction.KEEP if each.owner is None else actions.get(each.owner, TensorAction.KEEP) for each in saved
    ]
    offloaded = {place for place, action in enumerate(action_of) if action is TensorAction.OFFLOAD}
    moved = offloaded | {
        p for p, action in enumerate(action_of) if action is TensorAction.COMPRESS and not saved[p].is_small
    }
    most = block.temporary
    for interval in block.intervals:
        here = sum(saved[place].bytes for place in interval.here & moved)
        in_transfer = next((place for place in interval.next if place in offloaded), None)
        more = 0 if in_transfer is None or in_transfer in interval.here else saved[in_transfer].bytes
        most = max(most, interval.bytes + here + more)
    return most
