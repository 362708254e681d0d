"""The computed plan is the best one, by trying all plans of small problems."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from thrifty.memory.op_trace import OpOutput, OpTrace
from thrifty.memory.planner import memory_milp
from thrifty.memory.planner.memory_milp import fastest_plan
from thrifty.memory.planner.memory_plan import (
    BlockCosts,
    CompressionOption,
    OffloadLink,
    TensorAction,
    is_whole,
    peak_when_kept,
)
from thrifty.memory.planner.plan_choice import least_peak

PlanActions = list[dict[int, TensorAction]]
COMPRESSION = CompressionOption(bits=8, seconds_per_byte=0.05)


def random_block(chance: random.Random, size: int, in_part: float = 0.0) -> BlockCosts:
    """Return a block with random items; `in_part` is the probability that an item is saved only in part."""
    tape = OpTrace(input_bytes=chance.randint(1, 4))
    for number in range(size):
        reads = {source for source in range(number) if chance.random() < 0.4}
        item = OpOutput(number, "op", "", chance.randint(1, 9), chance.randint(1, 9), reads, number)
        item.saved_bytes = item.bytes * (chance.random() < 0.7)
        item.quantizable = chance.random() < 0.8
        item.storable = chance.random() < 0.9
        tape.items[number] = item
        tape.operations.append("op")
        tape.owners.append(number)
    for item in tape.items.values():
        if item.saved and in_part and chance.random() < in_part:
            item.saved_bytes = chance.randint(1, item.bytes)
    return BlockCosts(tape, chance.randint(0, 3), 0.5, chance.randint(1, 9), chance.randint(1, 9))


def legal(
    blocks: list[BlockCosts], compression: CompressionOption | None, link: OffloadLink | None
) -> Iterator[PlanActions]:
    """Yield every assignment of actions that a run could follow."""
    per_block = []
    for block in blocks:
        items = list(block.tape.items.values())
        choices = []
        for item in items:
            actions: list[TensorAction | None] = (
                [TensorAction.RECOMPUTE, TensorAction.KEEP]
                if item.saved
                else [None, TensorAction.RECOMPUTE, TensorAction.KEEP]
            )
            if item.storable:
                actions += [TensorAction.OFFLOAD] * bool(link) + [TensorAction.COMPRESS] * bool(
                    compression and item.quantizable
                )
            choices.append(actions)
        assignments = []
        for chosen in itertools.product(*choices):
            actions = {item.number: action for item, action in zip(items, chosen, strict=True) if action}
            sources = {n for item in items if actions.get(item.number) is TensorAction.RECOMPUTE for n in item.reads}
            follows_a_plan = any(item.saved and actions[item.number] is not TensorAction.KEEP for item in items)
            kept_at_no_moment = any(
                actions.get(item.number) is TensorAction.KEEP and not item.storable for item in items
            )
            exact = {n for n, action in actions.items() if action is not TensorAction.COMPRESS}
            if sources <= exact and not (follows_a_plan and kept_at_no_moment):
                assignments.append(actions)
        per_block.append(assignments)
    for together in itertools.product(*per_block):
        yield list(together)


def seconds_and_peak(
    blocks: list[BlockCosts], actions: PlanActions, compression: CompressionOption | None, link: OffloadLink | None
) -> tuple[float, float]:
    """Return the extra seconds of a plan and its peak bytes, computed independently."""
    seconds, peak, stored, moved, coming = 0.0, 0.0, 0.0, 0.0, 0.0
    for block, chosen in zip(blocks, actions, strict=True):
        items = block.tape.items
        seconds += sum(items[n].seconds for n, action in chosen.items() if action is TensorAction.RECOMPUTE)
        compressed = sum(items[n].bytes for n, action in chosen.items() if action is TensorAction.COMPRESS)
        offloaded = sum(items[n].bytes for n, action in chosen.items() if action is TensorAction.OFFLOAD)
        kept = sum(items[n].bytes for n, action in chosen.items() if action is TensorAction.KEEP)
        if compression:
            seconds += compression.seconds_per_byte * compressed
            stored += compressed / 4  # from 32 bits per element
        if any(item.saved and chosen[n] is not TensorAction.KEEP for n, item in items.items()):
            seconds += block.overhead
        else:  # autograd keeps only its saved tensors
            kept = sum(item.saved_bytes for item in items.values())
        stored += block.tape.input_bytes + kept
        again = sum(item.saved_bytes for n, item in items.items() if chosen.get(n) is not TensorAction.KEEP)
        peak = max(peak, stored + again + block.temporary + coming)
        moved += offloaded
        coming = offloaded
    if link:
        for meanwhile in (sum(block.forward for block in blocks), sum(block.backward for block in blocks)):
            seconds += max(moved / link.bytes_per_second - meanwhile, 0.0)
    return seconds, peak


@pytest.mark.parametrize("link", [None, OffloadLink(2.0)], ids=["no link", "a link"])
@pytest.mark.parametrize("compression", [None, COMPRESSION], ids=["exact", "compression"])
def test_plan_equals_exhaustive_search(compression: CompressionOption | None, link: OffloadLink | None) -> None:
    chance = random.Random(0)
    for _ in range(12):
        blocks = [
            random_block(chance, 3 if link and compression else 4, in_part=0.4),
            random_block(chance, 2, in_part=0.4),
        ]
        outcomes = [
            seconds_and_peak(blocks, actions, compression, link) for actions in legal(blocks, compression, link)
        ]
        for budget in (peak_when_kept(blocks) * share for share in (0.5, 0.65, 0.8, 1.0)):
            possible = [seconds for seconds, peak in outcomes if peak <= budget]
            plan = fastest_plan(blocks, budget, compression, link, gap=0.0)
            assert (plan is None) == (not possible)
            if plan is not None:
                seconds, peak = seconds_and_peak(blocks, list(plan.actions), compression, link)
                assert seconds == pytest.approx(min(possible)) == plan.seconds
                assert peak == pytest.approx(plan.peak) and peak <= budget * (1 + 1e-9)


@pytest.mark.parametrize("link", [None, OffloadLink(2.0)], ids=["no link", "a link"])
def test_block_recomputed_as_a_whole_is_one_of_the_options(link: OffloadLink | None) -> None:
    chance = random.Random(2)
    chosen_whole = 0
    for _ in range(12):
        blocks = [
            replace(block, whole=chance.choice([None, 0.5, 4.0]))
            for block in (random_block(chance, 3, in_part=0.4), random_block(chance, 3, in_part=0.4))
        ]
        outcomes = []
        for actions in legal(blocks, None, link):
            seconds, peak = seconds_and_peak(blocks, actions, None, link)
            for block, chosen in zip(blocks, actions, strict=True):
                if is_whole(block, chosen) and any(item.saved for item in block.tape.items.values()):
                    one_by_one = block.overhead + sum(item.seconds for item in block.tape.items.values())
                    seconds -= max(one_by_one - block.whole, 0.0)  # type: ignore[operator]
            outcomes.append((seconds, peak))
        for budget in (peak_when_kept(blocks) * share for share in (0.5, 0.65, 0.8)):
            possible = [seconds for seconds, peak in outcomes if peak <= budget]
            plan = fastest_plan(blocks, budget, None, link, gap=0.0)
            assert (plan is None) == (not possible)
            if plan is not None:
                assert plan.seconds == pytest.approx(min(possible)) and plan.peak <= budget + 1e-6
                chosen_whole += any(
                    is_whole(block, actions) for block, actions in zip(blocks, plan.actions, strict=True)
                )
    assert chosen_whole > 5


def test_more_memory_or_more_actions_are_never_slower() -> None:
    chance = random.Random(1)
    blocks = [random_block(chance, 8) for _ in range(4)]
    for block in blocks:
        for item in block.tape.items.values():
            item.storable = True
    kept = peak_when_kept(blocks)
    sets = [[TensorAction.RECOMPUTE], [TensorAction.COMPRESS], [TensorAction.OFFLOAD], list(TensorAction)]
    before = [math.inf] * len(sets)
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        plans = [
            fastest_plan(blocks, share * kept, COMPRESSION, OffloadLink(3.0), actions, gap=0.0) for actions in sets
        ]
        seconds = [math.inf if plan is None else plan.seconds for plan in plans]
        assert all(now <= then + 1e-9 for now, then in zip(seconds, before, strict=True))
        assert all(seconds[-1] <= single + 1e-9 for single in seconds[:-1])
        before = seconds
    assert before[-1] == 0.0


def test_infinite_link_is_free_and_slow_link_is_unused() -> None:
    chance = random.Random(2)
    blocks = [random_block(chance, 6) for _ in range(3)]
    for block in blocks:
        for item in block.tape.items.values():
            item.storable = True
    budget = 0.75 * peak_when_kept(blocks)
    without, fast, slow = (
        fastest_plan(blocks, budget, link=link, gap=0.0) for link in (None, OffloadLink(1e12), OffloadLink(1e-9))
    )
    assert without and fast and slow
    assert fast.seconds <= sum(block.overhead for block in blocks)
    assert slow.seconds == pytest.approx(without.seconds)


def test_no_plan_below_the_least_peak() -> None:
    chance = random.Random(3)
    blocks = [random_block(chance, 6) for _ in range(3)]
    assert fastest_plan(blocks, least_peak(blocks) * 0.99, COMPRESSION) is None
    assert fastest_plan(blocks, least_peak(blocks)) is not None


def test_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(4)
    blocks = [random_block(chance, 20) for _ in range(8)]
    for share in (0.5, 0.6, 0.7):
        fastest_plan(blocks, share * peak_when_kept(blocks), COMPRESSION, OffloadLink(3.0))
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_plan_with_compression_is_reproducible_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    blocks = [random_block(chance, 12) for _ in range(6)]
    monkeypatch.setattr(memory_milp, "NODES", 5)
    gaps = []
    for share in (0.3, 0.5, 0.7):
        budget = share * peak_when_kept(blocks)
        monkeypatch.setattr(memory_milp, "SECONDS", 20.0)
        plan = fastest_plan(blocks, budget, COMPRESSION, OffloadLink(3.0))
        assert plan is not None and plan.peak <= budget * (1 + 1e-9)
        monkeypatch.setattr(memory_milp, "SECONDS", 1e-6)
        assert fastest_plan(blocks, budget, COMPRESSION, OffloadLink(3.0)) == plan
        gaps.append(plan.gap)
    assert max(gaps) > 0.005, "no search reached its limit, so the test shows nothing"


def test_search_stopped_without_solution_still_returns_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_milp, "SECONDS", 1e-9)
    chance = random.Random(5)
    blocks = [random_block(chance, 12) for _ in range(6)]
    for share in (0.3, 0.5, 0.7):
        plan = fastest_plan(blocks, share * peak_when_kept(blocks), link=OffloadLink(3.0))
        assert plan is not None and plan.peak <= share * peak_when_kept(blocks) * (1 + 1e-9)
    assert fastest_plan(blocks, least_peak(blocks) * 0.5) is None
