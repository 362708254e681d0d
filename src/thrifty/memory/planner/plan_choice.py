"""The fastest of all plans for activations within a budget: one for single tensors, or one for the chain of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.ranks import from_first_rank, ranks
from thrifty.memory.op_trace import INPUT
from thrifty.memory.planner.chain_plan import chain_costs, schedule_plan
from thrifty.memory.planner.chain_schedule import least_bytes
from thrifty.memory.planner.memory_milp import fastest_plan
from thrifty.memory.planner.memory_plan import (
    BlockCosts,
    CompressionOption,
    MemoryPlan,
    OffloadLink,
    TensorAction,
    peak_when_kept,
    peak_when_made_again,
    peak_when_streamed,
)
from thrifty.memory.recompute_schedule import RecomputeAction, RecomputeSchedule


@dataclass(frozen=True)
class AllowedActions:
    """What may happen to a saved tensor beside being kept."""

    recompute: bool = True
    compression: CompressionOption | None = None
    link: OffloadLink | None = None


RECOMPUTE = AllowedActions()


def least_peak(blocks: Sequence[BlockCosts], allowed: AllowedActions = RECOMPUTE) -> float:
    """Bytes at the peak when as much is given up as is allowed, in the way that leaves least."""
    peaks = []
    if allowed.recompute:
        peaks.append(peak_when_made_again(blocks))
        if allowed.link:
            peaks.append(peak_when_made_again(blocks, TensorAction.OFFLOAD))
        if chain := chain_costs(blocks):
            peaks.append(float(least_bytes(chain)))
    if allowed.link:
        peaks.append(peak_when_streamed(blocks, TensorAction.OFFLOAD))
    if allowed.compression:
        peaks.append(peak_when_streamed(blocks, TensorAction.COMPRESS, allowed.compression.bits))
    return min(peaks, default=peak_when_kept(blocks))


def best_plan(blocks: Sequence[BlockCosts], budget: float, allowed: AllowedActions) -> MemoryPlan | None:
    """The plan with the least extra seconds, of those whose peak is within the budget; None where there is none."""
    ways = [TensorAction.KEEP, TensorAction.COMPRESS, TensorAction.OFFLOAD] + [
        TensorAction.RECOMPUTE
    ] * allowed.recompute
    tensors = fastest_plan(blocks, budget, allowed.compression, allowed.link, ways)
    chain = schedule_plan(blocks, budget) if allowed.recompute else None
    if tensors is None or chain is None:
        return tensors or chain
    if chain.seconds < tensors.seconds * (1 - 1e-6):
        return replace(chain, instead_of=tensors.seconds)
    return replace(tensors, instead_of=chain.seconds)


def agree_on_plan(plan: MemoryPlan, blocks: Sequence[BlockCosts]) -> MemoryPlan:
    """The first rank's plan on all ranks: what was measured differs, and they must gather weights together."""
    if ranks() == 1:
        return plan
    count, items = len(blocks), [(place, n) for place, block in enumerate(blocks) for n in (*block.tape.items, INPUT)]
    numbers = [_ORDER.index(plan.ways[place][n]) if n in plan.ways[place] else -1 for place, n in items]
    numbers += plan_to_numbers(plan.schedule, count)
    with _disable_current_modes():  # a plan is real where tensors are fake
        numbers = from_first_rank(torch.tensor(numbers)).tolist()
    schedule = plan_from_numbers(numbers[len(items) :], count)
    chosen: list[dict[int, TensorAction]] = [{} for _ in blocks]
    for (place, item), number in zip(items, numbers, strict=False):
        if number >= 0:
            chosen[place][item] = _ORDER[number]
    return replace(plan, ways=tuple(chosen), schedule=schedule)


_ORDER, _DEEDS = tuple(TensorAction), tuple(RecomputeAction)


def plan_to_numbers(schedule: RecomputeSchedule | None, count: int) -> list[int]:
    """Whether there is one, what is done first, and what is done again for each; -1 where nothing is said."""
    passes = [schedule.first, *(schedule.again.get(place, {}) for place in range(count))] if schedule else []
    said = [_DEEDS.index(each[place]) if place in each else -1 for each in passes for place in range(count)]
    return [int(schedule is not None), *said, *[-1] * (count * (count + 1) - len(said))]


def plan_from_numbers(numbers: Sequence[int], count: int) -> RecomputeSchedule | None:
    there, *said = numbers
    if not there:
        return None
    rows = [said[start : start + count] for start in range(0, len(said), count)]
    first, *again = ({place: _DEEDS[number] for place, number in enumerate(row) if number >= 0} for row in rows)
    return RecomputeSchedule(first, {place: each for place, each in enumerate(again) if each})
