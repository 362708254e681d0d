"""Schedules of a chain compared with hand-computed costs, with all possible schedules and with periodic ones."""

import heapq
import itertools
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.memory.planner.chain_schedule import (
    ScheduleProgress,
    advance,
    least_bytes,
    optimal_schedule,
    periodic_schedule,
    simulate,
)
from thrifty.memory.recompute_schedule import ChainCost, ChainStageCost, RecomputeAction, ScheduledOperation

PASS, INPUT, ALL, BACK = RecomputeAction
EQUAL = ChainCost(10, (ChainStageCost(1.0, 2.0, output=10, saved=100, passing=30, keeping=5, returning=20),) * 16)


def random_chain(seed: int) -> ChainCost:
    draw = random.Random(seed)
    stages = []
    for _ in range(min(draw.randint(1, 8), draw.randint(3, 8))):
        output, forward = draw.randint(0, 5), draw.randint(0, 6)
        stages.append(
            ChainStageCost(
                forward,
                draw.randint(0, 6),
                output,
                output + draw.randint(0, 8),
                passing=draw.choice((0, draw.randint(0, 4))),
                keeping=draw.choice((0, draw.randint(0, 4))),
                returning=draw.choice((0, draw.randint(0, 6))),
                stopped=draw.choice((None, draw.randint(0, forward))),
            )
        )
    return ChainCost(draw.randint(0, 4), tuple(stages))


def all_fronts(chain: ChainCost) -> list[tuple[int, float]]:
    """Return the least time for each peak at which it decreases, from the smallest peak on, by trying every schedule.

    Only repetitions are left out: of two schedules to the same state, one without less time or less memory is not
    followed.
    """
    start = ScheduleProgress(due=len(chain) - 1)
    queue, tie = [(start.peak, start.time, 0, start)], itertools.count(1)
    fastest: dict[tuple, float] = {}
    front: list[tuple[int, float]] = []
    while queue:  # by peak, then by time: a later entry has a larger peak
        peak, taken, _, progress = heapq.heappop(queue)
        place = (progress.due, progress.inputs, progress.saved, progress.at)
        if taken >= fastest.get(place, float("inf")):
            continue
        fastest[place] = taken
        if progress.due < 0:
            front.append((peak, taken))
            continue
        for operation in possible(progress):
            then = advance(chain, progress, operation)
            heapq.heappush(queue, (then.peak, then.time, next(tie), then))
    return front


def possible(progress: ScheduleProgress) -> Iterator[ScheduledOperation]:
    """Yield the operations that can come next: a backward pass as soon as possible, and no useless operations.

    Useless is computing an activation that exists already, or one after the stage of the next backward pass.
    """

    def kept(index: int) -> bool:
        return index in progress.inputs or index - 1 in progress.saved

    if progress.due in progress.saved:
        yield ScheduledOperation(BACK, progress.due)
        return
    for index in range(progress.due + 1):
        if index in progress.saved or not (kept(index) or progress.at == index):
            continue
        yield ScheduledOperation(ALL, index)
        if index == progress.due or kept(index + 1):
            continue
        yield ScheduledOperation(PASS, index)
        if not kept(index):
            yield ScheduledOperation(INPUT, index)


def test_costs_of_two_stages() -> None:
    first = ChainStageCost(1.0, 2.0, output=10, saved=40, passing=3, keeping=5, returning=7)
    second = ChainStageCost(4.0, 8.0, output=20, saved=50, passing=11, keeping=13, returning=17)
    chain = ChainCost(30, (first, second))
    keep = [(ALL, 0), (ALL, 1), (BACK, 1), (BACK, 0)]
    # at the last stage's backward pass: input, saved tensors of both, gradients of output and input, temporary
    assert simulate(chain, [ScheduledOperation(*each) for each in keep]) == (15.0, 30 + 40 + 50 + 20 + 10 + 17)
    again = [(INPUT, 0), (ALL, 1), (BACK, 1), (ALL, 0), (BACK, 0)]
    # same moment: the first stage holds only its output, which is the second stage's input
    assert simulate(chain, [ScheduledOperation(*each) for each in again]) == (16.0, 30 + 10 + 50 + 20 + 10 + 17)


def test_recomputed_forward_pass_stops_early() -> None:
    stage = ChainStageCost(4.0, 2.0, output=10, saved=10, stopped=3.0)
    periodic = periodic_schedule(3, 1)
    assert simulate(ChainCost(0, (stage,) * 3), periodic)[0] == 3 * 4 + 2 * 3 + 3 * 2


@pytest.mark.parametrize(
    "operations",
    [
        [(ALL, 0), (BACK, 0)],  # out of turn
        [(ALL, 1), (BACK, 1), (ALL, 0), (BACK, 0)],  # its input was never computed
        [(PASS, 0), (ALL, 1), (ALL, 1), (BACK, 1), (ALL, 0), (BACK, 0)],  # twice
        [(PASS, 0), (PASS, 1), (BACK, 1)],  # nothing saved
        [(PASS, 0), (ALL, 1), (BACK, 1)],  # not to the end
        [(PASS, 2)],
    ],
)
def test_invalid_schedule_is_refused(operations: list[tuple[RecomputeAction, int]]) -> None:
    with pytest.raises(UsageError):
        simulate(ChainCost(1, EQUAL.stages[:2]), [ScheduledOperation(*each) for each in operations])


@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(200))
def test_optimal_schedule_equals_exhaustive_search(seed: int) -> None:
    chain = random_chain(seed)
    front = all_fronts(chain)
    assert least_bytes(chain) == front[0][0]
    for bytes, taken in front:
        assert simulate(chain, optimal_schedule(chain, bytes, slots=bytes + 1)) == (taken, bytes)


def test_budget_below_minimum_reports_the_minimum() -> None:
    least = least_bytes(EQUAL)
    optimal_schedule(EQUAL, least)
    with pytest.raises(InfeasibleError, match=f"{least - 1:,} bytes") as infeasible:
        optimal_schedule(EQUAL, least - 1)
    assert f"{least:,}" in infeasible.value.fix


chains = some.builds(random_chain, some.integers(0, 10**6))


@settings(max_examples=100)
@given(chain=chains, slots=some.integers(1, 60), extra=some.integers(0, 40))
def test_optimal_schedule_fits_and_beats_periodic_ones(chain: ChainCost, slots: int, extra: int) -> None:
    budget = least_bytes(chain) + extra
    taken, peak = simulate(chain, optimal_schedule(chain, budget, slots))
    assert peak <= budget
    for every in range(1, len(chain) + 1):
        periodic, needed = simulate(chain, periodic_schedule(len(chain), every))
        assert needed > budget or taken <= periodic


@settings(max_examples=50)
@given(chain=chains, extra=some.integers(0, 40))
def test_more_memory_is_never_slower(chain: ChainCost, extra: int) -> None:
    budget = least_bytes(chain) + extra
    small, large = (simulate(chain, optimal_schedule(chain, each, slots=500))[0] for each in (budget, budget + 1))
    assert large <= small


def test_enough_memory_keeps_everything() -> None:
    everything = [ScheduledOperation(ALL, i) for i in range(16)] + [
        ScheduledOperation(BACK, i) for i in reversed(range(16))
    ]
    needed = simulate(EQUAL, everything)[1]
    assert EQUAL.kept == 10 + 16 * 100
    assert optimal_schedule(EQUAL, needed) == everything
    assert simulate(EQUAL, optimal_schedule(EQUAL, needed - 1))[0] == 48 + 1
    # three inputs and one stage's backward pass: a chain of any length needs little more than one stage
    assert least_bytes(EQUAL) < 2 * 100


@pytest.mark.slow
def test_long_chain_is_solved_in_seconds() -> None:
    draw = random.Random(0)
    stages = tuple(
        ChainStageCost(draw.random(), draw.random(), 2**20, draw.randint(20, 40) * 2**20, 2**22, 2**21, 2**22)
        for _ in range(100)
    )
    chain = ChainCost(2**20, stages)
    began = time.process_time()
    schedules = [optimal_schedule(chain, int(share * chain.kept)) for share in (0.3, 0.6)]
    assert time.process_time() - began < 15
    plain = sum(stage.forward + stage.backward for stage in stages)
    slow, fast = (simulate(chain, schedule)[0] / plain for schedule in schedules)
    assert 1 < fast < slow < 1.5


@pytest.mark.parametrize(("stages", "every"), [(16, 4), (16, 5), (7, 1), (3, 3), (3, 9)])
def test_periodic_schedules_run_all_but_the_last_segment_twice(stages: int, every: int) -> None:
    chain = ChainCost(10, EQUAL.stages[:stages])
    taken, peak = simulate(chain, periodic_schedule(stages, every))
    last = (stages - 1) % every + 1
    assert taken == 3 * stages + (stages - last)
    segments = -(-stages // every)
    assert peak <= 10 * segments + 100 * min(every, stages) + 10 + 10 + 30
