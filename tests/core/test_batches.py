"""Batches as a pure function of the step, for any division among ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from thrifty.core.batches import Batch, BatchSource, MappedSource, OversampledSource, RankShard
from thrifty.core.errors import RefusedError


class Numbered(BatchSource):
    """Source in which row r of step s has the value s · batch + r."""

    def __init__(self, batch: int):
        self.batch = batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        numbers = torch.arange(step * self.batch + start, step * self.batch + stop)
        return Batch({"number": numbers, "pair": torch.stack([numbers, -numbers], 1)}, self.weight(stop - start))

    def weight(self, count: int) -> Tensor:
        return torch.full((count,), 1 / self.batch, dtype=torch.float64)


def numbers(batch: Batch) -> list[int]:
    return batch["number"].tolist()


@given(size=some.integers(1, 5), ranks=some.integers(1, 6), step=some.integers(0, 1000))
def test_rank_shards_form_the_effective_batch(size: int, ranks: int, step: int) -> None:
    source = Numbered(size * ranks)
    parts = [RankShard(source, rank, ranks).at(step) for rank in range(ranks)]
    assert [n for part in parts for n in numbers(part)] == numbers(source.at(step))
    assert sum(float(part.weight.sum()) for part in parts) == pytest.approx(1.0)


@given(batch=some.integers(1, 6), times=some.integers(1, 5), step=some.integers(0, 1000), data=some.data())
def test_presampled_batch_joins_consecutive_batches(batch: int, times: int, step: int, data: some.DataObject) -> None:
    source = Numbered(batch)
    presampled = OversampledSource(source, times)
    whole = presampled.at(step)
    assert presampled.batch == len(whole) == batch * times
    assert numbers(whole) == [n for i in range(times) for n in numbers(source.at(step * times + i))]
    assert float(whole.weight.sum()) == pytest.approx(1.0)
    start = data.draw(some.integers(0, len(whole) - 1))
    stop = data.draw(some.integers(start + 1, len(whole)))
    assert numbers(presampled.rows(step, start, stop)) == numbers(whole)[start:stop]


@given(size=some.integers(1, 4), ranks=some.integers(1, 4), times=some.integers(1, 4), step=some.integers(0, 50))
def test_presampling_ranks_together_read_one_process_batch(size: int, ranks: int, times: int, step: int) -> None:
    source = Numbered(size * ranks)
    whole = sorted(numbers(OversampledSource(source, times).at(step)))
    before = [OversampledSource(RankShard(source, rank, ranks), times) for rank in range(ranks)]
    after = [RankShard(OversampledSource(source, times), rank, ranks) for rank in range(ranks)]
    for parts in (before, after):
        assert sorted(n for part in parts for n in numbers(part.at(step))) == whole


@given(ranks=some.integers(1, 4), step=some.integers(0, 50))
def test_mapping_commutes_with_rank_sharding(ranks: int, step: int) -> None:
    def shifted(step: int, batch: Batch) -> Batch:
        return batch.map(lambda tensor: tensor + step)

    source = Numbered(2 * ranks)
    for rank in range(ranks):
        one, other = (
            MappedSource(RankShard(source, rank, ranks), shifted),
            RankShard(MappedSource(source, shifted), rank, ranks),
        )
        assert numbers(one.at(step)) == numbers(other.at(step))
        assert one.batch == other.batch == 2


@given(batch=some.integers(1, 6), sizes=some.lists(some.integers(1, 12), min_size=1, max_size=8))
def test_resized_batches_keep_the_plain_order(batch: int, sizes: list[int]) -> None:
    source = Numbered(batch).with_batch_size(sizes)
    steps = [source.at(step) for step in range(len(sizes) + 3)]
    assert [len(step) for step in steps] == sizes + [sizes[-1]] * 3
    assert [n for step in steps for n in numbers(step)] == list(range(sum(sizes) + 3 * sizes[-1]))
    assert all(float(step.weight.sum()) == pytest.approx(1.0) for step in steps)
    assert source.batch == max(sizes) and all(size % source.unit == 0 for size in sizes)


@given(
    size=some.integers(1, 3), ranks=some.integers(1, 4), times=some.integers(1, 3), step=some.integers(0, 9),
    sizes=some.lists(some.integers(1, 4), min_size=1, max_size=5),
)  # fmt: skip
def test_resizing_commutes_with_rank_sharding(size: int, ranks: int, times: int, step: int, sizes: list[int]) -> None:
    source, sizes = Numbered(size * ranks), [size * ranks for size in sizes]
    whole = OversampledSource(source, times).with_batch_size(sizes).at(step)
    assert len(whole) == times * sizes[min(step, len(sizes) - 1)]
    first = times * sum((sizes + [sizes[-1]] * 9)[:step])
    assert numbers(whole) == list(range(first, first + len(whole)))
    before = [OversampledSource(RankShard(source, rank, ranks), times).with_batch_size(sizes) for rank in range(ranks)]
    after = [RankShard(OversampledSource(source, times).with_batch_size(sizes), rank, ranks) for rank in range(ranks)]
    for parts in (before, after):
        assert [n for part in parts for n in numbers(part.at(step))] == numbers(whole)
        assert sum(float(part.at(step).weight.sum()) for part in parts) == pytest.approx(1.0)


def test_unequal_rank_shards_are_refused() -> None:
    for make in (
        lambda: RankShard(Numbered(8).with_batch_size([2, 8]), 0, 4),
        lambda: RankShard(Numbered(8), 0, 4).with_batch_size([2, 8]),
    ):
        with pytest.raises(
            RefusedError, match="multiples of 2 examples cannot be divided equally among 4 ranks"
        ) as refused:
            make()
        assert refused.value.fix.endswith("multiples of 4")


def test_mapped_function_receives_the_run_step_after_resizing() -> None:
    mapped = MappedSource(
        Numbered(4), lambda step, batch: batch.map(lambda tensor: tensor + 100 * step)
    ).with_batch_size([2, 6])
    assert numbers(mapped.at(0)) == [0, 1] and numbers(mapped.at(1)) == [102, 103, 104, 105, 106, 107]


def test_selected_rows_keep_fields_and_weights() -> None:
    batch = Numbered(5).at(2).weighted(torch.arange(5.0))
    part = batch.take(torch.tensor([4, 0, 4]))
    assert numbers(part) == [14, 10, 14] and part.weight.tolist() == [4, 0, 4]
    assert part["pair"].tolist() == [[14, -14], [10, -10], [14, -14]]
    assert numbers(batch.rows(1, 3)) == [11, 12] and batch.rows(1, 3).weight.tolist() == [1, 2]
    assert len(part) == 3 and numbers(part.to("cpu")) == numbers(part)
