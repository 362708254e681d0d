import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st

from thrifty.core.batches import MappedSource, OversampledSource, RankShard
from thrifty.data.chat.conversation_packing import (
    ANSWER,
    BEGINS,
    HeldOutConversations,
    PackedConversations,
    StoredConversations,
    WeightedSource,
    arrange_rows,
    pack_rows,
)
from thrifty.data.epoch_sampler import EpochSource

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def stream(sizes, seed=0):
    """Return conversations of these sizes, with their number as tokens, about half of which are answers."""
    rng = np.random.default_rng(seed)
    words = []
    for number, size in enumerate(sizes):
        answers = rng.random(size) < 0.5
        answers[-1] = True
        own = np.full(size, number, np.uint32) | np.where(answers, np.uint32(ANSWER), np.uint32(0))
        own[0] |= np.uint32(BEGINS)
        words.append(own)
    return np.concatenate(words)


def rows_of(sizes, length, together=True, everything=False, by_tokens=True):
    found = StoredConversations(stream(sizes), length, everything)
    return PackedConversations(found, arrange_rows(found.sizes - 1, length, 0, together), length, 999, by_tokens)


@given(sizes=SIZES, length=st.integers(20, 50), seed=st.integers(0, 99))
def test_every_conversation_is_in_one_row_within_the_length(sizes, length, seed):
    rows = pack_rows(np.array(sizes), length, seed)
    assert sorted(np.concatenate(rows)) == list(range(len(sizes)))
    assert all(np.array(sizes)[row].sum() <= length for row in rows)
    filled = sorted(np.array(sizes)[row].sum() for row in rows)
    assert len(rows) == 1 or filled[0] + filled[1] > length  # no two rows fit into one


def test_rows_are_nearly_full():
    sizes = np.random.default_rng(0).integers(10, 200, 5000)
    assert sizes.sum() / (len(pack_rows(sizes, 512, 0)) * 512) > 0.99


@given(sizes=st.lists(st.integers(2, 30), min_size=1, max_size=40), together=st.booleans(), everything=st.booleans())
def test_row_has_whole_conversations_in_segments(sizes, together, everything):
    rows = rows_of(sizes, 24, together, everything)
    batch = rows.fields(np.arange(len(rows)))
    seen = []
    for tokens, targets, segments, share in zip(
        *(batch[name].numpy() for name in ("tokens", "targets", "segments", "share")), strict=True
    ):
        assert share.sum() == pytest.approx(1, abs=1e-5)
        assert (tokens[segments == 0] == 999).all() and (share[segments == 0] == 0).all()
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            number = tokens[here][0]
            assert (tokens[here] == number).all() and (targets[here] == number).all()
            assert here.sum() == min(sizes[number], 25) - 1
            seen.append(number)
            wanted = StoredConversations(stream(sizes), 24, everything).at(
                list(rows.conversations.begins).index(sum(sizes[:number]))
            )[1]
            assert ((share[here] > 0) == wanted).all()
    assert sorted(seen) == sorted(np.flatnonzero(np.isin(starts(sizes), rows.conversations.begins)))
    if not together:
        assert len(rows) == len(rows.conversations)


def starts(sizes):
    return np.concatenate(([0], np.cumsum(sizes)))[:-1]


def test_cut_conversation_without_answer_is_left_out():
    asked_only = np.array([0 | BEGINS, 0, 0, 0, ANSWER], np.uint32)
    answered = np.array([1 | BEGINS, 1, 1 | ANSWER, 1 | ANSWER, 1], np.uint32)
    words = np.concatenate((asked_only, answered))
    assert len(StoredConversations(words, 8, False)) == 2
    short = StoredConversations(words, 3, False)
    assert len(short) == 1 and short.cut == 1.0 and short.learned.tolist() == [2]
    assert len(StoredConversations(words, 3, True)) == 2


@trying(max_examples=40)
@given(step=st.integers(0, 1000), start=st.integers(0, 3), by_tokens=st.booleans(), seed=st.integers(0, 9))
def test_weights_sum_to_one_and_rows_are_parts_of_a_batch(step, start, by_tokens, seed):
    rows = rows_of(np.random.default_rng(3).integers(2, 20, 80), 32, by_tokens=by_tokens)
    source = WeightedSource(EpochSource(rows, 4, seed))
    whole, part = source.at(step), source.rows(step, start, 4)
    assert whole.weight.sum().item() == pytest.approx(1, abs=1e-6)
    assert all(torch.equal(part[name], whole[name][start:]) for name in whole.fields)
    assert torch.equal(part.weight, whole.weight[start:])
    shares = [RankShard(source, rank, 2).at(step).weight for rank in range(2)]
    assert torch.equal(torch.cat(shares), whole.weight)
    each = whole.weight[:, None] * whole["share"]
    counted = each[each > 0]
    if by_tokens:
        torch.testing.assert_close(counted, torch.full_like(counted, 1 / len(counted)))
    else:
        per_conversation = [
            each[row][whole["segments"][row] == segment].sum()
            for row in range(4)
            for segment in range(1, int(whole["segments"][row].max()) + 1)
        ]
        found = torch.stack(per_conversation)
        torch.testing.assert_close(found, torch.full_like(found, 1 / len(found)))


def test_batches_of_other_sizes_have_right_weights():
    source = WeightedSource(EpochSource(rows_of(np.random.default_rng(3).integers(2, 20, 80), 32), 4, 0))
    resized = source.with_batch_size([2, 3, 5])
    firsts = [0, 2, 5, 10]
    plain = torch.cat([source.at(step)["tokens"] for step in range(4)])
    for step in range(4):
        batch = resized.at(step)
        assert batch.weight.sum().item() == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(batch.weight, batch["amount"] / batch["amount"].sum())
        assert torch.equal(batch["tokens"], plain[firsts[step] : firsts[step] + len(batch)])


@pytest.mark.parametrize(
    "wrapped", [lambda source: source, lambda source: MappedSource(source, lambda _, batch: batch)]
)
def test_choice_among_batches_weighs_as_in_one_batch(wrapped):
    source = WeightedSource(EpochSource(rows_of(np.random.default_rng(3).integers(2, 20, 80), 32), 4, 0))
    presampled = OversampledSource(wrapped(source), 3)
    for step in range(4):
        batch = presampled.at(step)
        torch.testing.assert_close(batch.weight, batch["amount"] / batch["amount"].sum())
        assert torch.equal(presampled.rows(step, 3, 9).weight, batch.weight[3:9])
    twice = OversampledSource(OversampledSource(source, 3), 2).at(0)
    torch.testing.assert_close(twice.weight, twice["amount"] / twice["amount"].sum())


@pytest.mark.parametrize("by_tokens", [True, False])
def test_held_out_conversations_do_not_depend_on_packing(by_tokens):
    sizes = np.random.default_rng(1).integers(2, 20, 60)
    seen = []
    for together in (True, False):
        held_out = HeldOutConversations(rows_of(sizes, 32, together, by_tokens=by_tokens), together)
        batches = list(held_out.batches(12, 4))
        assert sum(float(batch.weight.sum()) for batch in batches) == pytest.approx(1, abs=1e-6)
        counts: dict[int, float] = {}
        for batch in batches:
            each = batch.weight[:, None] * batch["share"]
            for number in batch["tokens"].unique().tolist():
                if number != 999:
                    counts[number] = counts.get(number, 0) + float(each[batch["tokens"] == number].sum())
        seen.append(counts)
    assert len(seen[0]) == 12 and seen[0] == pytest.approx(seen[1], abs=1e-6)
