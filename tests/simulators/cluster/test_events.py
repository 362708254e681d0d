"""Simulated schedules against published formulas for bubbles and memory, and against real processes."""

import time
from itertools import pairwise

import pytest
from cluster_pipelines import Case, run_each
from hypothesis import given, settings
from hypothesis import strategies as some
from rank_processes import on_ranks

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.pipeline_events import PipelineTimeline, StageTransfer, play
from thrifty.simulators.cluster.pipeline_schedules import SCHEDULES, ScheduleAction, schedule

duration = some.integers(1, 20).map(lambda tenths: tenths / 10)


def played(name: str, ranks: int, parts: int, chunks: int = 1, **seconds: float) -> PipelineTimeline:
    """Simulate a schedule of equal stages. `seconds`, by kind of action, are for all chunks of a rank."""
    return play(schedule(name, ranks, parts, chunks), lambda action: seconds[action.kind] / chunks)


@given(
    name=some.sampled_from(["gpipe", "1f1b"]),
    ranks=some.integers(1, 12),
    parts=some.integers(1, 48),
    forward=duration,
    backward=duration,
)
def test_bubble_of_gpipe_and_1f1b(name: str, ranks: int, parts: int, forward: float, backward: float) -> None:
    """The bubble is (p - 1) / (m + p - 1) of all time (Huang et al. 2019, section 2.3)."""
    timeline = played(name, ranks, parts, F=forward, B=backward)
    assert timeline.bubble == pytest.approx((ranks - 1) / (parts + ranks - 1), abs=1e-12)
    assert timeline.makespan == pytest.approx((parts + ranks - 1) * (forward + backward))


@given(
    ranks=some.integers(1, 8),
    turns=some.integers(1, 5),
    chunks=some.integers(1, 4),
    forward=duration,
    backward=duration,
)
def test_bubble_of_interleaved(ranks: int, turns: int, chunks: int, forward: float, backward: float) -> None:
    """The bubble is (p - 1) / (v m) of computing time (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2)."""
    parts = ranks * turns
    timeline = played("interleaved", ranks, parts, chunks, F=forward, B=backward)
    assert timeline.bubble / (1 - timeline.bubble) == pytest.approx((ranks - 1) / (chunks * parts), abs=1e-9)


@given(ranks=some.integers(1, 8), more=some.integers(0, 24), forward=duration, inputs=duration, weights=duration)
def test_bubble_of_zero_bubble(ranks: int, more: int, forward: float, inputs: float, weights: float) -> None:
    """For W <= F and I, the bubble is (p - 1)(F + I - W) (Qi et al. 2023, table 2, ZB-H1), else (p - 1) · max(F, I)."""
    parts = ranks + more
    timeline = played("zero_bubble", ranks, parts, F=forward, I=inputs, W=weights)
    idle = timeline.makespan - parts * (forward + inputs + weights)
    assert idle == pytest.approx((ranks - 1) * max(forward + inputs - weights, forward, inputs), abs=1e-9)


@given(ranks=some.integers(1, 8), more=some.integers(0, 16))
def test_zero_bubble_v_has_no_bubble(ranks: int, more: int) -> None:
    """With F = I = W, idle time comes only from different start times (Qi et al. 2023, section 6)."""
    parts = 2 * ranks - 1 + more
    timeline = played("zero_bubble_v", ranks, parts, 2, F=1.0, I=1.0, W=1.0)
    for rank, events in enumerate(timeline.by_rank):
        assert events[-1].end - events[0].start == pytest.approx(timeline.busy(rank)) == 3 * parts
        assert timeline.peak(rank) <= 2 * ranks, "as many half micro-batches as on the first rank of 1F1B"
    assert timeline.makespan == pytest.approx(3 * parts + (ranks - 1) / 2)


@pytest.mark.parametrize(("ranks", "parts", "bubble"), [(2, 1, 0.5), (4, 4, 0.4286), (4, 16, 0.1579), (8, 32, 0.1795)])
def test_bubbles_of_known_pipelines(ranks: int, parts: int, bubble: float) -> None:
    for name in ("gpipe", "1f1b"):
        assert played(name, ranks, parts, F=1.0, B=2.0).bubble == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize(("ranks", "parts", "even", "slow"), [(4, 16, 0.1579, 0.236), (8, 32, 0.1795, 0.271)])
def test_a_slow_stage_costs_more_than_the_formula(ranks: int, parts: int, even: float, slow: float) -> None:
    """A first stage that is 25 % slower lengthens 1F1B. A slow later stage, or GPipe, costs more."""

    def bubble(name: str, stage: int) -> float:
        orders = schedule(name, ranks, parts)
        return play(orders, lambda at: {"F": 1.0, "B": 2.0}[at.kind] * (1.25 if at.stage == stage else 1)).bubble

    assert bubble("1f1b", 0) == pytest.approx(slow, abs=5e-4)
    worst = [bubble("1f1b", stage) for stage in range(ranks)]
    assert worst == sorted(worst)
    assert worst[-1] == pytest.approx(bubble("gpipe", 0)) == pytest.approx(bubble("gpipe", ranks - 1))
    assert min(worst) > even


@settings(max_examples=30)
@given(ranks=some.integers(1, 8), parts=some.integers(1, 24))
def test_live_micro_batches(ranks: int, parts: int) -> None:
    """GPipe has m, 1F1B p - rank (at most m), ZB-H1 p, of which `rank` are for W only (Qi et al. 2023, table 1)."""
    for rank in range(ranks):
        assert played("gpipe", ranks, parts, F=1.0, B=2.0).peak(rank) == parts
        assert played("1f1b", ranks, parts, F=1.0, B=2.0).peak(rank) == min(ranks - rank, parts)
        if parts >= ranks:
            timeline = played("zero_bubble", ranks, parts, F=1.0, I=1.0, W=1.0)
            assert timeline.peak(rank) == ranks
            assert timeline.peak(rank, for_weights=0.25) == (ranks - rank) + rank * 0.25


@given(ranks=some.integers(2, 8), turns=some.integers(2, 4), chunks=some.integers(1, 4))
def test_live_micro_batches_of_interleaved(ranks: int, turns: int, chunks: int) -> None:
    """The first rank has 1 + (p - 1)/(p v) times the micro-batches of 1F1B (Korthikanti et al. 2022, unverified)."""
    timeline = played("interleaved", ranks, ranks * turns, chunks, F=1.0, B=2.0)
    assert timeline.peak(0) / chunks == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * chunks)))


def test_held_bytes_over_time() -> None:
    timeline = play(schedule("1f1b", 2, 3), lambda action: 1.0 if action.kind == "F" else 2.0)
    assert timeline.live(0) == [(0, 1), (1, 2), (6, 1), (6, 2), (9, 1), (12, 0)]
    assert timeline.live(1, lambda stage: 100 * stage) == [(1, 100), (4, 0), (4, 100), (7, 0), (7, 100), (10, 0)]
    assert timeline.peak(0, lambda stage: 7.0) == 14.0


@given(
    name=some.sampled_from(SCHEDULES),
    ranks=some.integers(1, 6),
    turns=some.integers(1, 4),
    delay=duration,
    overlap=some.booleans(),
)
def test_events_respect_dependencies(name: str, ranks: int, turns: int, delay: float, overlap: bool) -> None:
    """Each event follows the previous event of its rank and its inputs. A link carries one transfer at a time."""
    chunks = 2 if name in ("interleaved", "zero_bubble_v") else 1
    orders = schedule(name, ranks, ranks * turns, chunks)
    timeline = play(orders, lambda action: 1.0 + action.stage % 3, lambda source, target: delay, overlap)
    ended: dict[ScheduleAction, float] = {event.action: event.end for event in timeline.events}
    assert sorted(ended) == sorted(action for order in orders for action in order)
    stages = ranks * chunks
    place = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    for rank, action, start, end in timeline.events:
        kind, stage, part = action
        assert end == start + 1.0 + stage % 3
        step = {"F": -1, "W": 0}.get(kind, 1)
        before = {"F": "F", "W": "I"}.get(kind) or ("B" if ScheduleAction("B", stage, part) in ended else "I")
        if kind in "BI" and stage == stages - 1:
            before, step = "F", 0
        if stage + step >= 0:
            transfer_delay = delay if place[stage + step] != rank else 0.0
            assert start >= ended[ScheduleAction(before, stage + step, part)] + transfer_delay
    for events in timeline.by_rank:
        assert all(left.end <= right.start for left, right in pairwise(events))
    by_link: dict[tuple[int, int], list[StageTransfer]] = {}
    for transfer in timeline.transfers:
        by_link.setdefault(transfer[:2], []).append(transfer)
    for carried in by_link.values():
        assert all(left.end <= right.start for left, right in pairwise(carried))


@given(ranks=some.integers(1, 8), parts=some.integers(1, 20), delay=some.floats(0, 1))
def test_overlapped_transfers_delay_gpipe_once_each_way(ranks: int, parts: int, delay: float) -> None:
    timeline = play(schedule("gpipe", ranks, parts), lambda action: 1.0, lambda source, target: delay)
    assert timeline.makespan == pytest.approx(2 * (parts + ranks - 1) + 2 * (ranks - 1) * delay)


def test_transfers_without_overlap_block_the_sender() -> None:
    timeline = play(schedule("gpipe", 2, 3), lambda action: 1.0, lambda source, target: 0.5, overlap=False)
    assert [event.start for event in timeline.by_rank[0][:3]] == [0.0, 1.5, 3.0]
    assert [event.end for event in timeline.by_rank[1][:3]] == [2.5, 4.0, 5.5]
    assert [event.start for event in timeline.by_rank[1][3:]] == [5.5, 7.0, 8.5]
    assert timeline.makespan == 9.5 + 0.5 + 1.0


def test_slow_transfers_set_the_pace() -> None:
    timeline = play(schedule("gpipe", 2, 4), lambda action: 1.0, lambda source, target: 3.0)
    assert [event.start for event in timeline.by_rank[1][:4]] == [4.0, 7.0, 10.0, 13.0]


def test_deadlocks_are_refused() -> None:
    with pytest.raises(UsageError, match="deadlocks"):
        play([[ScheduleAction("B", 0, 0), ScheduleAction("F", 0, 0)]], lambda action: 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_long_pipelines_are_simulated_in_seconds(name: str) -> None:
    orders = schedule(name, 128, 512)
    started = time.process_time()
    timeline = play(orders, lambda action: 1.0)
    assert timeline.bubble < 0.5
    assert time.process_time() - started < 4, "0.8 s and 1.1 s on a shared machine with 2 cores"


SLEEPS = {"F": 0.03, "B": 0.05, "I": 0.025, "W": 0.025}
STAGES = {"gpipe": 4, "1f1b": 4, "slow first stage": 4, "interleaved": 8, "zero_bubble": 4, "zero_bubble_v": 8}


def sleeping(case: str) -> Case:
    """Return a case of four ranks and eight micro-batches. A slow first stage (in 1F1B) takes 1.5 times as long."""
    slow = 1.5 if case == "slow first stage" else 1.0
    seconds = {
        (kind, stage): length * (slow if stage == 0 else 1.0)
        for kind, length in SLEEPS.items()
        for stage in range(STAGES[case])
    }
    return (case if slow == 1.0 else "1f1b"), 8, STAGES[case] // 4, seconds


@pytest.fixture(scope="module")
def real_seconds() -> dict[str, list[float]]:
    """Return makespans of pipelines of four real ranks that sleep instead of computing."""
    ranks = on_ranks(4, run_each, [sleeping(case) for case in STAGES], 4)
    result = {}
    for case, repeats in zip(STAGES, zip(*ranks, strict=True), strict=True):
        runs = list(zip(*repeats, strict=True))
        result[case] = [max(rank[-1][1] for rank in run) - min(rank[0][0] for rank in run) for run in runs]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGES)
def test_real_pipelines_take_the_simulated_time(case: str, real_seconds: dict[str, list[float]]) -> None:
    """Sleeps can be too long, but not too short, so the fastest of several runs counts."""
    name, parts, chunks, seconds = sleeping(case)
    simulated = play(schedule(name, 4, parts, chunks), lambda action: seconds[action.kind, action.stage]).makespan
    print(f"{case}: {simulated:.3f} s simulated, {[f'{real:.3f}' for real in real_seconds[case]]} s real")
    assert simulated <= min(real_seconds[case]) <= 1.1 * simulated
