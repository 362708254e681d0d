"""Memory plan that recomputes or keeps whole blocks, by an optimal schedule.

`chain_schedule` computes the schedule from costs in seconds. A last stage represents everything outside the blocks. It
cannot be recomputed.
"""

from collections.abc import Sequence
from dataclasses import replace

from thrifty.memory.planner.chain_schedule import (
    fastest_within,
    least_bytes,
    periodic_schedule,
    schedules_near,
    simulate,
)
from thrifty.memory.planner.memory_plan import BlockCosts, MemoryPlan, TensorAction, saved_items
from thrifty.memory.recompute_schedule import (
    ChainCost,
    ChainStageCost,
    RecomputeAction,
    RecomputeSchedule,
    ScheduledOperation,
)

PORTIONS = 500
"""Number of units into which a budget of bytes is divided. Short chains use four times as many."""
MOST_PORTIONS = 5_000_000
"""Maximum number of units over all segments of a chain."""


def chain_costs(blocks: Sequence[BlockCosts]) -> ChainCost | None:
    """Return the blocks as a chain, or None if a block cannot be recomputed. The last entry of `blocks` has the costs
    of all modules that are not in a block."""
    *inside, rest = blocks
    stages = [block.stage for block in inside if block.stage is not None]
    if not inside or len(stages) < len(inside):
        return None
    # a block's first input is the previous output; other inputs stay in memory during the whole step
    input_bytes = inside[0].tape.input_bytes + sum(
        max(block.tape.input_bytes - before.output, 0) for block, before in zip(inside[1:], stages, strict=False)
    )
    outside = max(rest.tape.input_bytes + rest.tape.saved_bytes - stages[-1].output, 0)
    return ChainCost(input_bytes, (*stages, ChainStageCost(0.0, 0.0, 0, outside, keeping=int(rest.temporary))))


def schedule_plan(blocks: Sequence[BlockCosts], budget: float) -> MemoryPlan | None:
    """Return the fastest schedule of whole blocks whose peak is within the budget, or None if no schedule fits."""
    chain = chain_costs(blocks)
    if chain is None or least_bytes(chain) > int(budget):
        return None
    operations = fastest_within(chain, _schedules(chain, int(budget)), int(budget))
    plain, _ = simulate(chain, periodic_schedule(len(chain), len(chain)))  # keeps everything
    seconds, peak = simulate(chain, operations)
    schedule = RecomputeSchedule.of(operations)
    return MemoryPlan(actions_of(blocks, schedule), max(seconds - plain, 0.0), peak, 0.0, schedule)


def _schedules(chain: ChainCost, budget: int) -> list[list[ScheduledOperation]]:
    """Return candidate schedules: of the whole chain, and of the blocks alone. Schedules of the blocks alone are
    computed for the whole budget, and for the budget minus the last stage's memory.
    """
    end, alone = chain.stages[-1], replace(chain, stages=chain.stages[:-1])
    portions = max(MOST_PORTIONS // len(chain) ** 2, PORTIONS)
    schedules = schedules_near(chain, budget, min(portions, 4 * PORTIONS))
    for left in (budget, budget - end.saved - end.keeping):
        if left >= least_bytes(alone):
            schedules += [add_chain_end(each) for each in schedules_near(alone, left, PORTIONS)]
    return schedules


def add_chain_end(operations: Sequence[ScheduledOperation]) -> list[ScheduledOperation]:
    """Insert the last stage (everything outside the blocks) between the forward and backward passes of the blocks."""
    turn = next(place for place, (do, _) in enumerate(operations) if do is RecomputeAction.BACKWARD)
    end = operations[turn].stage + 1
    return [
        *operations[:turn],
        ScheduledOperation(RecomputeAction.KEEP_ALL, end),
        ScheduledOperation(RecomputeAction.BACKWARD, end),
        *operations[turn:],
    ]


def actions_of(blocks: Sequence[BlockCosts], schedule: RecomputeSchedule) -> tuple[dict[int, TensorAction], ...]:
    """Return the actions of a schedule for single items. Saved tensors of a block are all kept or all recomputed."""
    return tuple(
        dict.fromkeys(saved_items(block.tape), TensorAction.KEEP)
        if place == len(blocks) - 1 or schedule.first.get(place, RecomputeAction.KEEP_INPUT) is RecomputeAction.KEEP_ALL
        else dict.fromkeys(block.tape.items, TensorAction.RECOMPUTE)
        for place, block in enumerate(blocks)
    )
