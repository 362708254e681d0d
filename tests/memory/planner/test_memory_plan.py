"""The plan that is found is the best there is, by trying all of them on small problems."""

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

Ways = list[dict[int, TensorAction]]
COMPRESSION = CompressionOption(bits=8, seconds_per_byte=0.05)


def a_block(chance: random.Random, size: int, in_part: float = 0.0) -> BlockCosts:
    """With a chance that of an item only a part is saved."""
    tape = OpTrace(input_bytes=chance.randint(1, 4))
    for number in range(size):
        reads = {source for source in range(number) if chance.random() < 0.4}
        item = OpOutput(number, "op", "", chance.randint(1, 9), chance.randint(1, 9), reads, number)
        item.saved_bytes = item.bytes * (chance.random() < 0.7)
        item.codable = chance.random() < 0.8
        item.storable = chance.random() < 0.9
        tape.items[number] = item
        tape.operations.append("op")
        tape.belongs.append(number)
    for item in tape.items.values():
        if item.saved and in_part and chance.random() < in_part:
            item.saved_bytes = chance.randint(1, item.bytes)
    return BlockCosts(tape, chance.randint(0, 3), 0.5, chance.randint(1, 9), chance.randint(1, 9))


def legal(blocks: list[BlockCosts], compression: CompressionOption | None, link: OffloadLink | None) -> Iterator[Ways]:
    """Every assignment of ways that a run could follow."""
    per_block = []
    for block in blocks:
        items = list(block.tape.items.values())
        choices = []
        for item in items:
            ways: list[TensorAction | None] = (
                [TensorAction.RECOMPUTE, TensorAction.KEEP]
                if item.saved
                else [None, TensorAction.RECOMPUTE, TensorAction.KEEP]
            )
            if item.storable:
                ways += [TensorAction.OFFLOAD] * bool(link) + [TensorAction.COMPRESS] * bool(
                    compression and item.codable
                )
            choices.append(ways)
        found = []
        for chosen in itertools.product(*choices):
            ways = {item.number: way for item, way in zip(items, chosen, strict=True) if way}
            sources = {n for item in items if ways.get(item.number) is TensorAction.RECOMPUTE for n in item.reads}
            follows_a_plan = any(item.saved and ways[item.number] is not TensorAction.KEEP for item in items)
            kept_at_no_moment = any(ways.get(item.number) is TensorAction.KEEP and not item.storable for item in items)
            exact = {n for n, way in ways.items() if way is not TensorAction.COMPRESS}
            if sources <= exact and not (follows_a_plan and kept_at_no_moment):
                found.append(ways)
        per_block.append(found)
    for together in itertools.product(*per_block):
        yield list(together)


def seconds_and_peak(
    blocks: list[BlockCosts], ways: Ways, compression: CompressionOption | None, link: OffloadLink | None
) -> tuple[float, float]:
    """What a plan takes longer, and its bytes at the peak, written down anew."""
    seconds, peak, stored, moved, coming = 0.0, 0.0, 0.0, 0.0, 0.0
    for block, chosen in zip(blocks, ways, strict=True):
        items = block.tape.items
        seconds += sum(items[n].seconds for n, way in chosen.items() if way is TensorAction.RECOMPUTE)
        compressed = sum(items[n].bytes for n, way in chosen.items() if way is TensorAction.COMPRESS)
        offloaded = sum(items[n].bytes for n, way in chosen.items() if way is TensorAction.OFFLOAD)
        kept = sum(items[n].bytes for n, way in chosen.items() if way is TensorAction.KEEP)
        if compression:
            seconds += compression.seconds_per_byte * compressed
            stored += compressed / 4  # of numbers of 32 bits
        if any(item.saved and chosen[n] is not TensorAction.KEEP for n, item in items.items()):
            seconds += block.overhead
        else:  # autograd's own way, which keeps no more than it needs
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
def test_it_is_the_best_of_all_plans(compression: CompressionOption | None, link: OffloadLink | None) -> None:
    chance = random.Random(0)
    for _ in range(12):
        blocks = [a_block(chance, 3 if link and compression else 4, in_part=0.4), a_block(chance, 2, in_part=0.4)]
        outcomes = [seconds_and_peak(blocks, ways, compression, link) for ways in legal(blocks, compression, link)]
        for budget in (peak_when_kept(blocks) * share for share in (0.5, 0.65, 0.8, 1.0)):
            possible = [seconds for seconds, peak in outcomes if peak <= budget]
            plan = fastest_plan(blocks, budget, compression, link, gap=0.0)
            assert (plan is None) == (not possible)
            if plan is not None:
                seconds, peak = seconds_and_peak(blocks, list(plan.ways), compression, link)
                assert seconds == pytest.approx(min(possible)) == plan.seconds
                assert peak == pytest.approx(plan.peak) and peak <= budget * (1 + 1e-9)


@pytest.mark.parametrize("link", [None, OffloadLink(2.0)], ids=["no link", "a link"])
def test_a_block_made_again_as_a_whole_is_one_of_the_ways(link: OffloadLink | None) -> None:
    chance = random.Random(2)
    chosen_whole = 0
    for _ in range(12):
        blocks = [
            replace(block, whole=chance.choice([None, 0.5, 4.0]))
            for block in (a_block(chance, 3, in_part=0.4), a_block(chance, 3, in_part=0.4))
        ]
        outcomes = []
        for ways in legal(blocks, None, link):
            seconds, peak = seconds_and_peak(blocks, ways, None, link)
            for block, chosen in zip(blocks, ways, strict=True):
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
                chosen_whole += any(is_whole(block, ways) for block, ways in zip(blocks, plan.ways, strict=True))
    assert chosen_whole > 5


def test_more_memory_is_never_slower_and_more_ways_are_never_worse() -> None:
    chance = random.Random(1)
    blocks = [a_block(chance, 8) for _ in range(4)]
    for block in blocks:
        for item in block.tape.items.values():
            item.storable = True
    kept = peak_when_kept(blocks)
    sets = [[TensorAction.RECOMPUTE], [TensorAction.COMPRESS], [TensorAction.OFFLOAD], list(TensorAction)]
    before = [math.inf] * len(sets)
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        plans = [fastest_plan(blocks, share * kept, COMPRESSION, OffloadLink(3.0), ways, gap=0.0) for ways in sets]
        seconds = [math.inf if plan is None else plan.seconds for plan in plans]
        assert all(now <= then + 1e-9 for now, then in zip(seconds, before, strict=True))
        assert all(seconds[-1] <= single + 1e-9 for single in seconds[:-1])
        before = seconds
    assert before[-1] == 0.0


def test_a_link_without_limit_costs_nothing_and_one_without_bandwidth_is_none() -> None:
    chance = random.Random(2)
    blocks = [a_block(chance, 6) for _ in range(3)]
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


def test_below_what_remains_when_everything_is_made_again_there_is_no_plan() -> None:
    chance = random.Random(3)
    blocks = [a_block(chance, 6) for _ in range(3)]
    assert fastest_plan(blocks, least_peak(blocks) * 0.99, COMPRESSION) is None
    assert fastest_plan(blocks, least_peak(blocks)) is not None


def test_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(4)
    blocks = [a_block(chance, 20) for _ in range(8)]
    for share in (0.5, 0.6, 0.7):
        fastest_plan(blocks, share * peak_when_kept(blocks), COMPRESSION, OffloadLink(3.0))
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_plan_with_compression_does_not_depend_on_how_fast_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    blocks = [a_block(chance, 12) for _ in range(6)]
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
    assert max(gaps) > 0.005, "no search was cut off, so nothing is shown"


def test_a_search_that_is_cut_off_before_it_has_found_anything_is_no_proof_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_milp, "SECONDS", 1e-9)
    chance = random.Random(5)
    blocks = [a_block(chance, 12) for _ in range(6)]
    for share in (0.3, 0.5, 0.7):
        plan = fastest_plan(blocks, share * peak_when_kept(blocks), link=OffloadLink(3.0))
        assert plan is not None and plan.peak <= share * peak_when_kept(blocks) * (1 + 1e-9)
    assert fastest_plan(blocks, least_peak(blocks) * 0.5) is None
