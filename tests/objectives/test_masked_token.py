"""Masked tokens: predicted positions, replacements, loss and scores."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tiny_networks import VOCABULARY, HeadApart, bert
from torch import nn

from thrifty.core.batches import Batch, MappedSource, OversampledSource, RankShard
from thrifty.core.errors import UsageError
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens
from thrifty.kernels.chunked_cross_entropy import IGNORED
from thrifty.objectives.masked_token import MaskedToken
from thrifty.techniques.curriculum.sequence_length import SequenceLengthWarmup

MASK, SPECIAL = 3, frozenset({0, 1, 2, 3})
TEXT = np.random.default_rng(0).integers(4, VOCABULARY, 20_000).astype(np.uint16)
OBJECTIVE = MaskedToken(mask=MASK, vocabulary=VOCABULARY, special=SPECIAL)


def source(
    batch: int = 8, length: int = 40, seed: int = 0, objective: MaskedToken = OBJECTIVE, text: np.ndarray = TEXT
):
    packed = PackedTokens(text, length, batch, seed)
    return packed, MappedSource(packed, lambda step, batch: objective.examples(batch))


def same(one: Batch, other: Batch) -> bool:
    return one.fields.keys() == other.fields.keys() and all(torch.equal(one[name], other[name]) for name in one.fields)


def test_fractions_of_masked_random_and_unchanged_tokens() -> None:
    _, masked = source(batch=400, length=40)
    batch = masked.at(0)
    shown = batch["tokens"].gather(1, batch["places"])
    n = shown.numel()
    stays = (shown == batch["targets"]).double().mean().item()
    hidden = (shown == MASK).double().mean().item()
    unchanged_by_luck = 0.1 / (VOCABULARY - len(SPECIAL))  # a random token may be the right one
    for fraction, wanted in (
        (hidden, 0.8),
        (stays, 0.1 + unchanged_by_luck),
        (1 - hidden - stays, 0.1 - unchanged_by_luck),
    ):
        assert abs(fraction - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / n)


def test_positions_and_random_tokens_are_equally_likely() -> None:
    objective = replace(OBJECTIVE, mask_share=0.0, random_share=1.0)
    _, masked = source(batch=480, objective=objective)
    batches = [masked.at(step) for step in range(10)]
    places = torch.cat([batch["places"].flatten() for batch in batches]).bincount(minlength=40)
    drawn = torch.cat([batch["tokens"].gather(1, batch["places"]).flatten() for batch in batches])
    assert drawn.min() == 4 and drawn.max() == VOCABULARY - 1
    for counts in (places, drawn.bincount(minlength=VOCABULARY)[4:]):
        expected = counts.sum() / len(counts)
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        assert chi_squared < len(counts) - 1 + 5 * math.sqrt(2 * (len(counts) - 1))


@given(length=some.integers(1, 70), rate=some.floats(0.01, 1.0), step=some.integers(0, 10**6))
def test_rows_have_equally_many_predictions_and_no_other_change(length: int, rate: float, step: int) -> None:
    packed, masked = source(length=length, objective=replace(OBJECTIVE, rate=rate))
    text, batch = packed.at(step)["tokens"][:, :-1], masked.at(step)
    assert batch["places"].shape == batch["targets"].shape == (8, max(1, round(rate * length)))
    assert (batch["places"].diff(dim=1) > 0).all()
    assert torch.equal(batch["tokens"].scatter(1, batch["places"], batch["targets"]), text)
    assert torch.equal(text.gather(1, batch["places"]), batch["targets"])
    assert torch.equal(batch.weight, packed.at(step).weight)


@given(step=some.integers(0, 10**6), start=some.integers(0, 7), rows=some.integers(1, 8))
def test_any_rows_are_those_of_the_whole_batch(step: int, start: int, rows: int) -> None:
    _, masked = source()
    stop = min(start + rows, 8)
    assert same(masked.rows(step, start, stop), masked.at(step).rows(start, stop))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_read_the_batch_of_one_process(ranks: int) -> None:
    packed, masked = source()
    shares = [RankShard(masked, rank, ranks).at(5) for rank in range(ranks)]
    before = [
        MappedSource(RankShard(packed, rank, ranks), lambda _, batch: OBJECTIVE.examples(batch))
        for rank in range(ranks)
    ]
    for rank, share in enumerate(shares):
        assert same(share, masked.at(5).rows(rank * 8 // ranks, (rank + 1) * 8 // ranks))
        assert same(share, before[rank].at(5))
    assert same(OversampledSource(masked, 2).at(3).rows(8, 16), masked.at(7))


def test_masks_change_each_epoch_and_with_the_seed() -> None:
    packed, masked = source(batch=10, text=TEXT[:401])
    for step in (0, 1):
        assert sorted(packed.at(step)["tokens"][:, 0].tolist()) == sorted(packed.at(0)["tokens"][:, 0].tolist())
    assert not same(masked.at(0), masked.at(1))
    one, other = (Batch({"tokens": packed.at(0)["tokens"], "key": source(10, seed=s)[0].at(0)["key"]}, torch.ones(10))
                  for s in (0, 1))  # fmt: skip
    assert not same(OBJECTIVE.examples(one), OBJECTIVE.examples(other))


def test_held_out_masks_are_the_same_at_every_evaluation() -> None:
    held_out = HeldOutWindows(TEXT[:2000], 40).shaped(OBJECTIVE.examples)
    first, again = list(held_out.batches(20, 8)), list(held_out.batches(20, 8))
    assert all(same(one, other) for one, other in zip(first, again, strict=True))
    fewer = next(HeldOutWindows(TEXT[:2000], 40).shaped(OBJECTIVE.examples).batches(5, 5))
    assert same(fewer, first[0].rows(0, 5))
    assert len({tuple(row) for batch in first for row in batch["places"].tolist()}) == 20


def test_special_tokens_are_neither_masked_nor_sampled() -> None:
    text = TEXT.copy()
    text[::3] = 1
    _, masked = source(batch=200, text=text)
    batch = masked.at(0)
    assert not torch.isin(batch["targets"], torch.tensor(sorted(SPECIAL))).any()
    shown = batch["tokens"].gather(1, batch["places"])
    assert set(shown.unique().tolist()) & SPECIAL == {MASK}


def test_row_with_few_ordinary_tokens_keeps_its_predictions() -> None:
    tokens = torch.full((1, 41), 2)
    tokens[0, 17] = 50
    batch = OBJECTIVE.examples(Batch({"tokens": tokens, "key": torch.tensor([12345])}, torch.ones(1)))
    assert batch["places"].shape == (1, 6) and 17 in batch["places"]


def test_fractions_that_sum_to_more_than_one_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"mask_share 0.8 and objective.random_share 0.3 sum to more than 1"
    ) as refused:
        MaskedToken(random_share=0.3)
    assert refused.value.fix == "--set objective.random_share=0.2"
    with pytest.raises(UsageError, match="rate is 0"):
        MaskedToken(rate=0.0)
    assert MaskedToken(mask_share=0.7, random_share=0.3)


@pytest.mark.parametrize("wrap", [HeadApart, lambda network: network])
def test_the_loss_and_its_gradient_are_those_of_transformers(wrap) -> None:
    network = bert()
    _, masked = source()
    batch = masked.at(0)
    labels = torch.full_like(batch["tokens"], IGNORED).scatter(1, batch["places"], batch["targets"])
    expected = network(batch["tokens"], labels=labels).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    model = wrap(network)
    losses = OBJECTIVE.losses(OBJECTIVE.predict(model, batch), batch)
    loss = (losses * batch.weight).sum()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert OBJECTIVE.tokens(batch) == 8 * 40
    for name, parameter in network.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrap", [HeadApart, lambda network: network])
def test_scores_and_normalizers_equal_those_of_logits(wrap) -> None:
    network = bert()
    batch = source()[1].at(0)
    prediction = OBJECTIVE.predict(wrap(network), batch)
    logits = prediction.logits.detach().double().requires_grad_()
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum").backward()
    scores = OBJECTIVE.scores(prediction, batch).double()
    torch.testing.assert_close(scores, logits.grad.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-6)
    normalizers = OBJECTIVE.normalizers(prediction, batch).double()
    torch.testing.assert_close(normalizers, logits.detach().logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_texts_are_cut_before_masking() -> None:
    packed, _ = source()
    shorter = SequenceLengthWarmup(start=8, until=4, phases=2, multiple=4).batches(packed)
    for step, length in ((0, 8), (2, 24), (4, 40)):
        batch = OBJECTIVE.examples(shorter.at(step))
        assert batch["tokens"].shape == (8, length) and batch["places"].shape == (8, max(1, round(0.15 * length)))
        restored = batch["tokens"].scatter(1, batch["places"], batch["targets"])
        assert torch.equal(restored, packed.at(step)["tokens"][:, :length])
    assert OBJECTIVE.examples(batch) is batch


def test_head_runs_at_predicted_positions_only() -> None:
    model = HeadApart(bert())
    batch = source()[1].at(0)
    prediction = OBJECTIVE.predict(model, batch)
    assert prediction.hidden.shape == (8, 6, 32)
    assert torch.equal(prediction.hidden[2, 3], model(batch["tokens"])[2, batch["places"][2, 3]])


@settings(max_examples=20)
@given(size=some.integers(1, 300), special=some.sets(some.integers(0, 50), max_size=20))
def test_random_tokens_are_within_the_vocabulary(size: int, special: set[int]) -> None:
    objective = MaskedToken(
        mask=size + 60, vocabulary=size + 61, special=frozenset(special | {size + 60}), mask_share=0.0, random_share=1.0
    )
    tokens = torch.randint(0, size + 60, (4, 33), generator=torch.Generator().manual_seed(size))
    batch = objective.examples(Batch({"tokens": tokens, "key": torch.arange(4)}, torch.ones(4)))
    drawn = batch["tokens"].gather(1, batch["places"])
    assert not set(drawn.flatten().tolist()) & (special | {size + 60}) and drawn.max() < size + 60
