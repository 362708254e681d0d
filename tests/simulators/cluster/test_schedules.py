"""Pipeline schedules: orders equal to torch's own schedules, and invalid orders."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.pipeline_schedules import SCHEDULES, ScheduleAction, check, placement, schedule, walk

RANKS = 4


@pytest.fixture
def ranks_in_name_only() -> Iterator[None]:
    """Open a fake process group to build torch's schedules."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def torch_orders(kind: type, parts: int, stages: list[int], count: int) -> list[list[str]]:
    """Return torch's actions of each rank, as in `0F3`: stage 0, forward, micro-batch 3."""
    pipeline_stages = [PipelineStage(torch.nn.Identity(), stage, count, torch.device("cpu")) for stage in stages]
    if issubclass(kind, schedules.PipelineScheduleSingle):
        orders = kind(pipeline_stages[0], parts, loss_fn=torch.add)._get_pipeline_order()
    else:
        orders = kind(pipeline_stages, parts, loss_fn=torch.add).pipeline_order
    computing = [
        [action for action in orders[rank] if action and action.microbatch_index is not None] for rank in orders
    ]
    return [[str(action) for action in order] for order in computing]


def orders_in_short(name: str, parts: int, chunks: int = 1) -> list[list[str]]:
    return [[f"{stage}{kind}{part}" for kind, stage, part in order] for order in schedule(name, RANKS, parts, chunks)]


@pytest.mark.usefixtures("ranks_in_name_only")
@pytest.mark.parametrize("parts", [1, 3, 4, 8, 12])
def test_orders_equal_torch(parts: int) -> None:
    if parts >= RANKS:  # torch numbers the forward passes of the last rank from 1
        assert orders_in_short("1f1b", parts)[:-1] == torch_orders(schedules.Schedule1F1B, parts, [0], RANKS)[:-1]
    mine = orders_in_short("zero_bubble_v", parts, 2)
    assert mine == torch_orders(schedules.ScheduleZBVZeroBubble, parts, [0, 2 * RANKS - 1], 2 * RANKS)
    if parts % RANKS == 0:
        assert orders_in_short("zero_bubble", parts) == torch_orders(
            schedules.ScheduleInterleavedZeroBubble, parts, [0], RANKS
        )
        for chunks in (1, 2, 3):
            stages = [RANKS * chunk for chunk in range(chunks)]
            theirs = torch_orders(schedules.ScheduleInterleaved1F1B, parts, stages, RANKS * chunks)
            assert orders_in_short("interleaved", parts, chunks) == theirs


@pytest.mark.usefixtures("ranks_in_name_only")
def test_gpipe_equals_torch_with_reversed_backward_passes() -> None:
    """Backward passes are in reverse order, as in the paper's figure 2c; torch runs these in forward order."""
    for mine, theirs in zip(orders_in_short("gpipe", 5), torch_orders(schedules.ScheduleGPipe, 5, [0], 4), strict=True):
        assert mine[:5] + mine[:4:-1] == theirs


@given(
    name=some.sampled_from(SCHEDULES), ranks=some.integers(1, 9), parts=some.integers(1, 40), chunks=some.integers(1, 4)
)
def test_every_schedule_can_be_run(name: str, ranks: int, parts: int, chunks: int) -> None:
    chunks = {"interleaved": chunks, "zero_bubble_v": 2}.get(name, 1)
    parts = ranks * parts if name == "interleaved" else parts
    orders = schedule(name, ranks, parts, chunks)
    check(orders)
    assert len(orders) == ranks
    assert len(placement(orders)) == ranks * chunks
    assert {action.part for order in orders for action in order} == set(range(parts))


def test_placement_of_stages() -> None:
    assert placement(schedule("1f1b", 3, 2)) == [0, 1, 2]
    assert placement(schedule("interleaved", 3, 3, 2)) == [0, 1, 2, 0, 1, 2]
    assert placement(schedule("zero_bubble_v", 3, 2, 2)) == [0, 1, 2, 2, 1, 0]


def test_walks_respect_dependencies() -> None:
    there, last = {None}, {}
    for rank, action, needed, left in walk(orders := schedule("interleaved", 4, 8, 2)):
        assert needed in there
        there.add(left)
        position = orders[rank].index(action)
        assert position == last.get(rank, -1) + 1
        last[rank] = position


def order(words: str) -> list[ScheduleAction]:
    """Return an order from words as in `0F3`: stage 0, forward, micro-batch 3."""
    return [ScheduleAction(kind, int(stage), int(part)) for stage, kind, part in words.split()]


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (("0B0 0F0", "1F0 1B0"), "rank 0 deadlocks at ScheduleAction\\(kind='B', stage=0, part=0\\)"),
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 0 deadlocks"),
        (("0F0 0F0 0B0", "1F0 1B0"), "stage 0 runs FFB on micro-batch 0"),
        (("0F0 0I0", "1F0 1B0"), "stage 0 runs FI on micro-batch 0"),
        (("0F0 0W0 0I0", "1F0 1B0"), "deadlocks"),
        (("0F0 0B0", "1F0 1I0 1B0 1W0"), "stage 1 runs FIBW"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0"), "deadlocks"),
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "stage 0 runs F on micro-batch 1"),
        (("0F0 0B0", "0F0 0B0"), "stage 0 is on ranks 0 and 1"),
        (("1F0 1B0",), "the stages \\[1\\] have gaps"),
    ],
)
def test_invalid_orders_are_refused(orders: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check([order(words) for words in orders])


def test_unsupported_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean '1f1b'"):
        schedule("1f1", 4, 8)
    with pytest.raises(UsageError, match="use at least 1 of each"):
        schedule("1f1b", 4, 0)
    with pytest.raises(UsageError, match="set chunks to 1; or use interleaved"):
        schedule("gpipe", 4, 8, 2)
    with pytest.raises(UsageError, match="'zero_bubble_v' cannot have 1 stages per rank"):
        schedule("zero_bubble_v", 4, 8)
    with pytest.raises(UsageError, match="use 8 micro-batches"):
        schedule("interleaved", 4, 10, 2)
    with pytest.raises(UsageError, match="use 4 micro-batches"):
        schedule("interleaved", 4, 3, 2)
