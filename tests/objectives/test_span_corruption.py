"""Spans cut out of plain text: no token is lost, and all rows have the same lengths."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from thrifty.core.batches import Batch, MappedSource
from thrifty.core.errors import UsageError
from thrifty.data.text.token_windows import PackedTokens
from thrifty.objectives.sequence_to_sequence import SequenceToSequence
from thrifty.objectives.span_corruption import corrupt_spans, lengths, span_counts, text_length

FIRST_SENTINEL = 100_000
TEXT = np.random.default_rng(0).integers(4, 97, 20_000).astype(np.uint16)


def corrupt(tokens: np.ndarray, keys: np.ndarray, rate: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    cut, spans = span_counts(tokens.shape[1], rate, mean_span)
    return corrupt_spans(tokens, keys, cut, spans, FIRST_SENTINEL + np.arange(spans))


def parts(row: list[int]) -> list[list[int]]:
    """Return the parts of a row between its sentinels, which must be in order."""
    divided: list[list[int]] = [[]]
    for token in row:
        if token >= FIRST_SENTINEL:
            assert token == FIRST_SENTINEL + len(divided) - 1
            divided.append([])
        else:
            divided[-1].append(token)
    return divided


@given(
    length=some.integers(2, 200),
    rate=some.floats(0.01, 0.9),
    mean_span=some.floats(1, 12),
    keys=some.lists(some.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
)
def test_spans_in_place_of_sentinels_restore_the_text(
    length: int, rate: float, mean_span: float, keys: list[int]
) -> None:
    tokens = np.arange(len(keys) * length).reshape(len(keys), length)
    cut, spans = span_counts(length, rate, mean_span)
    sources, targets = corrupt(tokens, np.array(keys), rate, mean_span)
    for text, source, target in zip(tokens.tolist(), sources.tolist(), targets.tolist(), strict=True):
        kept, taken = parts(source), parts(target)
        assert len(kept) == len(taken) == spans + 1
        assert kept[-1] == [] and taken[0] == [], "text comes first and a span last"
        assert all(kept[:-1]) and all(taken[1:]), "no part is empty"
        assert sum(map(len, taken)) == cut
        assert [token for pair in zip(kept, [*taken[1:], []], strict=True) for part in pair for token in part] == text


@pytest.mark.parametrize(("length", "text", "target"), [(512, 568, 114), (128, 141, 29), (1024, 1137, 229)])
def test_text_lengths_equal_t5(length: int, text: int, target: int) -> None:
    assert text_length(length, 0.15, 3.0) == text
    assert lengths(text, 0.15, 3.0) == (length, target)


@given(length=some.integers(3, 600), rate=some.floats(0.01, 0.9), mean_span=some.floats(1, 12))
def test_the_longest_text_that_fits_is_taken(length: int, rate: float, mean_span: float) -> None:
    text = text_length(length, rate, mean_span)
    assert max(lengths(text, rate, mean_span)) <= length < max(lengths(text + 1, rate, mean_span))


def test_a_length_too_short_for_any_span_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.length is 2"):
        text_length(2, 0.15, 3.0)


def test_divisions_into_spans_are_equally_likely() -> None:
    # 3 of 6 tokens in 2 spans: 2 divisions of the text times 2 divisions of the cut tokens
    sources, _ = corrupt(np.tile(np.arange(6), (4000, 1)), np.arange(4000) * 7919, 0.5, 1.5)
    _, counts = np.unique(sources, axis=0, return_counts=True)
    assert len(counts) == 4
    assert abs(counts - 1000).max() < 5 * math.sqrt(4000 * 0.25 * 0.75)


def objective(length: int) -> tuple[int, SequenceToSequence]:
    plain = SequenceToSequence()
    spans = len(plain.special_tokens(length))
    sentinels = tuple(range(FIRST_SENTINEL, FIRST_SENTINEL + spans))
    return plain.text_length(length), SequenceToSequence(sentinels=sentinels, end_of_text=0)


@given(step=some.integers(0, 10**6), start=some.integers(0, 7), rows=some.integers(1, 8))
def test_any_rows_equal_the_whole_batch_with_fixed_lengths(step: int, start: int, rows: int) -> None:
    text, learned = objective(64)
    source = MappedSource(PackedTokens(TEXT, text, 8, seed=0), lambda _, batch: learned.examples(batch))
    whole, part = source.at(step), source.rows(step, start, min(start + rows, 8))
    assert whole["source"].shape == (8, 64) and whole["tokens"].shape == (8, lengths(text, 0.15, 3.0)[1] + 1)
    for name in ("source", "tokens"):
        assert torch.equal(part[name], whole[name][start : start + rows])


def test_end_of_text_starts_the_target_and_ends_both() -> None:
    text, learned = objective(64)
    batch = learned.examples(PackedTokens(TEXT, text, 8, seed=0).at(0))
    assert (batch["source"][:, -1] == 0).all() and (batch["source"][:, :-1] != 0).all()
    assert (batch["tokens"][:, 0] == 0).all() and (batch["tokens"][:, -1] == 0).all()
    assert (batch["tokens"][:, 1] == FIRST_SENTINEL).all()
    assert learned.tokens(batch) == 8 * 64


def test_one_named_sentinel_per_span() -> None:
    names = SequenceToSequence().special_tokens(512)
    assert names[:2] == ("<extra_id_0>", "<extra_id_1>")
    assert len(names) == 114 - 1 - round(568 * 0.15)


def test_pairs_are_unchanged() -> None:
    pairs = Batch({"source": torch.ones(2, 3), "tokens": torch.ones(2, 4)}, torch.ones(2))
    assert SequenceToSequence().examples(pairs) is pairs
