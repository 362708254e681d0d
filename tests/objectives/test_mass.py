"""MASS: one span is masked in the encoder and decoded at its positions."""

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from tiny_networks import VOCABULARY
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from thrifty.core.batches import Batch, MappedSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.data.text.token_windows import PackedTokens
from thrifty.models import build_model
from thrifty.models.hf_wrapper import HuggingFaceSeq2Seq
from thrifty.models.weight_conversion import import_folder
from thrifty.objectives.mass import Mass, hidden_span

MASK = 3
TEXT = np.random.default_rng(0).integers(4, VOCABULARY, 20_000).astype(np.uint16)
OBJECTIVE = Mass(mask=MASK)


def rows(length: int = 24, batch: int = 4, objective: Mass = OBJECTIVE, step: int = 0) -> Batch:
    return objective.examples(PackedTokens(TEXT, length, batch, seed=0).at(step))


@settings(deadline=None)
@given(length=some.integers(1, 60), rate=some.floats(0.01, 1.0), step=some.integers(0, 10**6))
def test_span_in_its_place_restores_the_text(length: int, rate: float, step: int) -> None:
    text = PackedTokens(TEXT, length, 4, seed=0).at(step)
    batch = Mass(rate=rate, mask=MASK).examples(text)
    count = max(1, round(rate * length))
    places, span = batch["positions"], batch["tokens"][:, 1:]
    assert places.shape == span.shape == (4, count)
    assert (places.diff(dim=1) == 1).all(), "one span, without gaps"
    assert (batch["source"].gather(1, places) == MASK).all() and (batch["tokens"][:, 0] == MASK).all()
    assert (batch["source"] == MASK).sum() == 4 * count
    assert torch.equal(batch["source"].scatter(1, places, span), text["tokens"][:, :-1])


def test_span_starts_are_equally_likely() -> None:
    _, _, places = hidden_span(np.zeros((6000, 9), dtype=np.int64), np.arange(6000) * 7919, 4, MASK)
    counts = np.bincount(places[:, 0])
    assert len(counts) == 6
    assert abs(counts - 1000).max() < 5 * math.sqrt(6000 * (1 / 6) * (5 / 6))


@settings(deadline=None)
@given(step=some.integers(0, 10**6), start=some.integers(0, 7), count=some.integers(1, 8))
def test_any_rows_are_those_of_the_whole_batch(step: int, start: int, count: int) -> None:
    source = MappedSource(PackedTokens(TEXT, 24, 8, seed=0), lambda _, batch: OBJECTIVE.examples(batch))
    whole, part = source.at(step), source.rows(step, start, min(start + count, 8))
    for name in whole.fields:
        assert torch.equal(part[name], whole[name][start : start + count])


def marian(positions: int = 64) -> MarianConfig:
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    return MarianConfig(
        vocab_size=VOCABULARY, d_model=32, max_position_embeddings=positions, pad_token_id=0,
        decoder_start_token_id=0, init_std=0.2, activation_function="swish", **sides,
    )  # fmt: skip


def test_loss_equals_marian_with_masks_outside_the_span(tmp_path) -> None:
    """Marian's decoder counts positions from the start.

    As in the paper, it reads masks before the span. An attention mask hides them from the span.
    """
    torch.manual_seed(0)
    theirs = MarianMTModel(marian()).eval()
    theirs.save_pretrained(tmp_path / "marian")
    ours, _ = import_folder(tmp_path / "marian")
    batch = rows()
    losses = OBJECTIVE.losses(OBJECTIVE.predict(ours, batch), batch)
    for row in range(4):
        places, tokens = batch["positions"][row], batch["tokens"][row]
        begin, end = int(places[0]), int(places[-1]) + 1
        inputs = torch.cat((torch.full((begin,), MASK), tokens[:-1]))[None]
        keep = (torch.arange(end) >= begin).long()[None]
        logits = theirs(
            input_ids=batch["source"][row][None], decoder_input_ids=inputs, decoder_attention_mask=keep, use_cache=False
        ).logits[0, begin:]
        wanted = torch.nn.functional.cross_entropy(logits, tokens[1:])
        torch.testing.assert_close(losses[row], wanted, rtol=1e-5, atol=1e-5)
    assert OBJECTIVE.tokens(batch) == 4 * 24


def test_loss_on_t5_equals_transformers(tmp_path) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    theirs = T5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "t5")
    ours, _ = import_folder(tmp_path / "t5")
    batch = rows()
    losses = OBJECTIVE.losses(OBJECTIVE.predict(ours, batch), batch)
    logits = theirs(input_ids=batch["source"], decoder_input_ids=batch["tokens"][:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)


def test_marian_decoder_reads_the_span_at_its_positions() -> None:
    model = build_model(ModelSettings(preset="marian-nano", depth=1, width=32), VOCABULARY, 24, 0, "mass")
    batch = rows()
    before = OBJECTIVE.predict(model, batch).hidden
    moved = Batch({**batch.fields, "positions": (batch["positions"] + 1) % 24}, batch.weight)
    assert (OBJECTIVE.predict(model, moved).hidden - before).abs().max() > 1e-3


def test_target_token_does_not_reach_its_own_prediction() -> None:
    model = build_model(ModelSettings(preset="t5-nano", depth=1, width=32), VOCABULARY, 24, 0, "mass")
    batch = rows()
    tokens = batch["tokens"].clone()
    tokens[:, 6] = 50  # the target of the sixth position, and the input of the seventh
    changed = Batch({**batch.fields, "tokens": tokens}, batch.weight)
    before, after = (OBJECTIVE.predict(model, each).hidden for each in (batch, changed))
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6], after[:, 6])


def test_other_models_than_encoder_decoders_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot learn sequence_to_sequence"):
        build_model(ModelSettings(preset="bert-nano"), 40, 16, 0, "mass")
    torch.manual_seed(0)
    with pytest.raises(RefusedError, match="has no table of positions"):
        t5 = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        OBJECTIVE.predict(HuggingFaceSeq2Seq(T5ForConditionalGeneration(t5)), rows())
    with pytest.raises(UsageError, match="rate is 0"):
        Mass(rate=0.0)


def test_prepared_rows_are_unchanged() -> None:
    assert OBJECTIVE.examples(batch := rows()) is batch


@pytest.mark.parametrize("kind", ["Bart", "MBart", "Marian", "Pegasus"])
def test_a_foreign_decoder_reads_the_span_at_its_positions(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    name = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    lm = getattr(transformers, name)(config).eval()
    batch = rows()
    tokens, positions = batch["tokens"][:, :-1], batch["positions"]
    decoder = lm.get_decoder()
    with torch.no_grad():
        table = decoder.embed_positions(torch.zeros(1, 24).long() if "Bart" in kind else torch.Size((1, 24)))
        table = table.reshape(24, 32)
        words = decoder.embed_tokens(tokens)
        moved = words + table[positions] - table[: tokens.shape[1]]
        expected = lm(input_ids=batch["source"], decoder_inputs_embeds=moved).logits
        model = HuggingFaceSeq2Seq(lm)
        actual = OBJECTIVE.predict(model, batch).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        plain = lm(input_ids=batch["source"], decoder_input_ids=tokens).logits
        torch.testing.assert_close(model.logits(batch["source"], tokens), plain)
        assert (actual - plain).abs().max() > 1e-4
