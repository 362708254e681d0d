"""Subsets of a source's examples, through wrapped sources and augmentation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from thrifty.core.batches import BatchSource, ExampleSubset, MappedSource, OversampledSource, RankShard, ResizedSource
from thrifty.core.errors import RefusedError
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.data.epoch_sampler import EpochSource, fingerprint
from thrifty.data.images.image_data import open_images
from thrifty.data.text.token_windows import PackedTokens

TOKENS = np.arange(100, dtype=np.uint16)  # 33 windows of 3, which begin with 0, 3, 6, …
EVEN = ExampleSubset(torch.arange(0, 33, 2))


def packed(batch: int = 4, seed: int = 0) -> PackedTokens:
    return PackedTokens(TOKENS, 3, batch, seed)


def digits(augment: AugmentationSettings | None = None, seed: int = 0) -> EpochSource:
    source = open_images(DataSettings(source="digits", batch=8, augment=augment), seed, None, print).train
    assert isinstance(source, EpochSource)
    return source


def numbers(source: BatchSource, steps: int) -> list[int]:
    return [int(tokens[0]) // 3 for step in range(steps) for tokens in source.at(step)["tokens"]]


@given(seed=some.integers(0, 100), batch=some.integers(1, 8), kept=some.sets(some.integers(0, 32), min_size=8))
def test_each_epoch_reads_the_chosen_examples_once(seed: int, batch: int, kept: set[int]) -> None:
    source = packed(batch, seed).subset(ExampleSubset(torch.tensor(sorted(kept))))
    seen = numbers(source, 2 * len(kept))[: 2 * len(kept)]
    assert sorted(seen[: len(kept)]) == sorted(seen[len(kept) :]) == sorted(kept)
    assert float(source.at(0).weight.sum()) == pytest.approx(1.0)


def test_subset_of_a_subset_has_numbers_of_the_whole() -> None:
    twice = packed().subset(EVEN).subset(ExampleSubset(torch.arange(4, 12)))
    assert twice.selected_subset is not None and twice.selected_subset.kept.tolist() == list(range(8, 24, 2))
    assert set(numbers(twice, 4)) == set(range(8, 24, 2))


def test_wrapped_sources_pass_the_subset_on() -> None:
    source = packed(4)
    chosen = source.subset(EVEN)
    wrappers = [
        lambda inner: MappedSource(inner, lambda step, batch: batch.rows(0, 2)),
        lambda inner: RankShard(inner, 1, 2),
        lambda inner: OversampledSource(inner, 2),
        lambda inner: ResizedSource(inner, [1, 3, 4]),
    ]
    for wrap in wrappers:
        after, before = wrap(source).subset(EVEN), wrap(chosen)
        assert type(after) is type(before)
        assert numbers(after, 6) == numbers(before, 6)
        assert after.selected_subset is chosen.selected_subset or torch.equal(after.selected_subset.kept, EVEN.kept)
        assert after.example_index().fingerprint == chosen.example_index().fingerprint
        assert (
            after.with_batch_size([2, 4]).at(1)["tokens"].tolist()
            == before.with_batch_size([2, 4]).at(1)["tokens"].tolist()
        )


def test_fewer_examples_than_one_batch_are_refused() -> None:
    with pytest.raises(RefusedError, match="3 examples are left to train on, fewer than one effective batch of 4"):
        packed(4).subset(ExampleSubset(torch.arange(3)))


def test_examples_without_numbers_are_refused() -> None:
    class Conversations:
        def __len__(self) -> int:
            return 9

        def fields(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            return {}

    for source in (BatchSource(), EpochSource(Conversations(), 2, 0)):
        with pytest.raises(RefusedError, match="no fixed numbers"):
            source.subset(ExampleSubset(torch.arange(4)))
        with pytest.raises(RefusedError, match="no fixed numbers"):
            source.example_index()


def test_fingerprint_depends_on_the_examples_only() -> None:
    same = packed().example_index()
    assert same.count == 33 and same.labels is None
    assert packed(7, seed=5).example_index() == same
    others = [PackedTokens(TOKENS, 4, 4, 0), PackedTokens(TOKENS[:-1], 3, 4, 0), PackedTokens(TOKENS + 1, 3, 4, 0)]
    fingerprints = {source.example_index().fingerprint for source in [packed(), *others, packed().subset(EVEN)]}
    assert len(fingerprints) == 5
    assert fingerprint(TOKENS) != fingerprint(TOKENS.astype(np.uint32))


def test_image_index_ignores_size_and_augmentation() -> None:
    whole = digits().example_index()
    assert whole.labels is not None and len(whole.labels) == whole.count == 1300
    assert digits(AugmentationSettings(crop=1), seed=3).example_index().fingerprint == whole.fingerprint
    larger = open_images(DataSettings(source="digits", batch=8, size=16), 0, None, print).train
    assert larger.example_index().fingerprint == whole.fingerprint
    first = digits().subset(ExampleSubset(torch.arange(40))).example_index()
    assert first.labels is not None and torch.equal(first.labels, whole.labels[:40])


def test_chosen_images_are_mixed_with_chosen_images_only() -> None:
    labels = digits().example_index().labels
    assert labels is not None
    zeros = (labels == 0).nonzero().squeeze(1)
    source = digits(AugmentationSettings(mixup=1.0)).subset(ExampleSubset(zeros))
    for step in range(5):
        assert source.at(step)["labels"].argmax(1).eq(0).all()


def test_sequential_batches_are_in_order_without_augmentation() -> None:
    plain, moved = digits(), digits(AugmentationSettings(crop=2, flip=True, mixup=0.4))
    whole = torch.cat([batch["inputs"] for batch in moved.sequential_batches(500)])
    assert torch.equal(whole, torch.cat([batch["inputs"] for batch in plain.sequential_batches(77)]))
    labels = torch.cat([batch["labels"] for batch in moved.sequential_batches(500)])
    assert torch.equal(labels, plain.example_index().labels)
    assert sum(float(batch.weight.sum()) for batch in moved.sequential_batches(500)) == pytest.approx(1.0)


def test_sequential_texts_have_keys_independent_of_the_seed() -> None:
    (one,), (other,) = packed(seed=0).sequential_batches(100), packed(seed=1).subset(EVEN).sequential_batches(100)
    assert torch.equal(one["key"][EVEN.kept], other["key"]) and len(one["key"].unique()) == 33
    assert torch.equal(one["tokens"][EVEN.kept], other["tokens"])
