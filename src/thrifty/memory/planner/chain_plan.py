"""The best schedule of whole blocks as a plan for activations: what `chain_schedule` finds, in seconds and with all
that lies outside the blocks as one more stage, at which nothing can be saved."""

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
"""Of a budget, in which bytes are counted; four times as many for short chains."""
MOST_PORTIONS = 5_000_000
"""Over all stretches of a chain."""


def chain_costs(blocks: Sequence[BlockCosts]) -> ChainCost | None:
    """The blocks, the last of which stands for all that is outside of them, as a chain; None where one of them cannot
    be made again as part of one."""
    *inside, rest = blocks
    stages = [block.stage for block in inside if block.stage is not None]
    if not inside or len(stages) < len(inside):
        return None
    # a block's own input is the output of the one before it; what else it is given is there throughout
    input_bytes = inside[0].tape.input_bytes + sum(
        max(block.tape.input_bytes - before.output, 0) for block, before in zip(inside[1:], stages, strict=False)
    )
    outside = max(rest.tape.input_bytes + rest.tape.saved_bytes - stages[-1].output, 0)
    return ChainCost(input_bytes, (*stages, ChainStageCost(0.0, 0.0, 0, outside, keeping=int(rest.temporary))))


def schedule_plan(blocks: Sequence[BlockCosts], budget: float) -> MemoryPlan | None:
    """The fastest schedule of whole blocks whose peak is within the budget; None where there is none."""
    chain = chain_costs(blocks)
    if chain is None or least_bytes(chain) > int(budget):
        return None
    operations = fastest_within(chain, _schedules(chain, int(budget)), int(budget))
    plain, _ = simulate(chain, periodic_schedule(len(chain), len(chain)))  # keeps all
    seconds, peak = simulate(chain, operations)
    schedule = RecomputeSchedule.of(operations)
    return MemoryPlan(actions_of(blocks, schedule), max(seconds - plain, 0.0), peak, 0.0, schedule)


def _schedules(chain: ChainCost, budget: int) -> list[list[ScheduledOperation]]:
    """Those of the chain, and those of the blocks alone, as methods that know of nothing else find them: for all of the
    budget, which is theirs but for one moment, and for what is left of it at that moment."""
    end, alone = chain.stages[-1], replace(chain, stages=chain.stages[:-1])
    portions = max(MOST_PORTIONS // len(chain) ** 2, PORTIONS)
    schedules = schedules_near(chain, budget, min(portions, 4 * PORTIONS))
    for left in (budget, budget - end.saved - end.keeping):
        if left >= least_bytes(alone):
            schedules += [add_chain_end(each) for each in schedules_near(alone, left, PORTIONS)]
    return schedules


def add_chain_end(operations: Sequence[ScheduledOperation]) -> list[ScheduledOperation]:
    """A schedule of the blocks alone, with what is outside of them between forward and backward passes."""
    turn = next(place for place, (do, _) in enumerate(operations) if do is RecomputeAction.BACKWARD)
    end = operations[turn].stage + 1
    return [
        *operations[:turn],
        ScheduledOperation(RecomputeAction.KEEP_ALL, end),
        ScheduledOperation(RecomputeAction.BACKWARD, end),
        *operations[turn:],
    ]


def actions_of(blocks: Sequence[BlockCosts], schedule: RecomputeSchedule) -> tuple[dict[int, TensorAction], ...]:
    """What a schedule means for single items: of a block all that is saved is kept, or all is made again."""
    return tuple(
        dict.fromkeys(saved_items(block.tape), TensorAction.KEEP)
        if place == len(blocks) - 1 or schedule.first.get(place, RecomputeAction.KEEP_INPUT) is RecomputeAction.KEEP_ALL
        else dict.fromkeys(block.tape.items, TensorAction.RECOMPUTE)
        for place, block in enumerate(blocks)
    )
