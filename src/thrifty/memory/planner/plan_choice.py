"""Choice of the faster of two memory plans within a budget: for single tensors, or for the chain of blocks."""

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
    peak_when_recomputed,
    peak_when_streamed,
)
from thrifty.memory.recompute_schedule import RecomputeAction, RecomputeSchedule


@dataclass(frozen=True)
class AllowedActions:
    """Allowed actions for a saved tensor in addition to keeping it."""

    recompute: bool = True
    compression: CompressionOption | None = None
    link: OffloadLink | None = None


RECOMPUTE = AllowedActions()


def least_peak(blocks: Sequence[BlockCosts], allowed: AllowedActions = RECOMPUTE) -> float:
    """Return the smallest peak in bytes that the allowed actions can reach."""
    peaks = []
    if allowed.recompute:
        peaks.append(peak_when_recomputed(blocks))
        if allowed.link:
            peaks.append(peak_when_recomputed(blocks, TensorAction.OFFLOAD))
        if chain := chain_costs(blocks):
            peaks.append(float(least_bytes(chain)))
    if allowed.link:
        peaks.append(peak_when_streamed(blocks, TensorAction.OFFLOAD))
    if allowed.compression:
        peaks.append(peak_when_streamed(blocks, TensorAction.COMPRESS, allowed.compression.bits))
    return min(peaks, default=peak_when_kept(blocks))


def best_plan(blocks: Sequence[BlockCosts], budget: float, allowed: AllowedActions) -> MemoryPlan | None:
    """Return the plan with the least extra seconds whose peak is within the budget, or None if no plan fits."""
    actions = [TensorAction.KEEP, TensorAction.COMPRESS, TensorAction.OFFLOAD] + [
        TensorAction.RECOMPUTE
    ] * allowed.recompute
    tensors = fastest_plan(blocks, budget, allowed.compression, allowed.link, actions)
    chain = schedule_plan(blocks, budget) if allowed.recompute else None
    if tensors is None or chain is None:
        return tensors or chain
    if chain.seconds < tensors.seconds * (1 - 1e-6):
        return replace(chain, other_seconds=tensors.seconds)
    return replace(tensors, other_seconds=chain.seconds)


def agree_on_plan(plan: MemoryPlan, blocks: Sequence[BlockCosts]) -> MemoryPlan:
    """Return the plan of the first rank on all ranks. This is required, because measured costs differ between ranks,
    but all ranks must gather weights in the same order.
    """
    if ranks() == 1:
        return plan
    count, items = len(blocks), [(place, n) for place, block in enumerate(blocks) for n in (*block.tape.items, INPUT)]
    numbers = [_ORDER.index(plan.actions[place][n]) if n in plan.actions[place] else -1 for place, n in items]
    numbers += plan_to_numbers(plan.schedule, count)
    with _disable_current_modes():  # the plan must be a real tensor, even in a fake tensor mode
        numbers = from_first_rank(torch.tensor(numbers)).tolist()
    schedule = plan_from_numbers(numbers[len(items) :], count)
    chosen: list[dict[int, TensorAction]] = [{} for _ in blocks]
    for (place, item), number in zip(items, numbers, strict=False):
        if number >= 0:
            chosen[place][item] = _ORDER[number]
    return replace(plan, actions=tuple(chosen), schedule=schedule)


_ORDER, _SCHEDULE_ORDER = tuple(TensorAction), tuple(RecomputeAction)


def plan_to_numbers(schedule: RecomputeSchedule | None, count: int) -> list[int]:
    """Encode a schedule as integers: 1 if it exists, else 0; then first and repeated actions; -1 for no action."""
    passes = [schedule.first, *(schedule.again.get(place, {}) for place in range(count))] if schedule else []
    codes = [_SCHEDULE_ORDER.index(each[place]) if place in each else -1 for each in passes for place in range(count)]
    return [int(schedule is not None), *codes, *[-1] * (count * (count + 1) - len(codes))]


def plan_from_numbers(numbers: Sequence[int], count: int) -> RecomputeSchedule | None:
    is_present, *codes = numbers
    if not is_present:
        return None
    rows = [codes[start : start + count] for start in range(0, len(codes), count)]
    first, *again = (
        {place: _SCHEDULE_ORDER[number] for place, number in enumerate(row) if number >= 0} for row in rows
    )
    return RecomputeSchedule(first, {place: each for place, each in enumerate(again) if each})
