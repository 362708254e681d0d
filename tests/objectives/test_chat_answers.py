"""Packed conversations against single conversations and against transformers."""

import numpy as np
import pytest
import torch
import transformers
from chat_runs import small_tokenizer, sums
from tiny_models import FAMILIES, SMALL, random_model

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError
from thrifty.data.chat.chat_data import stored_tokens
from thrifty.data.chat.conversation_packing import (
    PackedConversations,
    StoredConversations,
    WeightedSource,
    arrange_rows,
)
from thrifty.data.epoch_sampler import EpochSource
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives import find_objective
from thrifty.techniques.attention.tiled import TiledAttention

LENGTH = 96


@pytest.fixture(scope="module")
def conversations():
    tokenizer = small_tokenizer()
    pieces = [tokenizer.pieces(row["messages"]) for row in sums(40)]
    words = np.concatenate([stored_tokens(found) for found in tokenizer.encode_pieces(pieces)])
    return StoredConversations((words & ~np.uint32(0x1FF)) | (words & np.uint32(0xFF)), LENGTH, False)


def batch_of(conversations, together, by_tokens=True, rows=None):
    """Return a batch of all conversations, or of their first `rows` rows."""
    places = arrange_rows(conversations.sizes - 1, LENGTH, 0, together)[:rows]
    found = PackedConversations(conversations, places, LENGTH, 0, by_tokens).fields(np.arange(len(places)))
    return Batch(found, found["amount"] / found["amount"].sum())


def loss_of(model, batch, **settings):
    objective = find_objective("chat_answers", **settings)
    losses = objective.losses(objective.predict(model, batch), batch)
    return (losses * batch.weight).sum()


def small(style):
    """Return a small model that takes rows with segments."""
    kv_heads = 2 if style == "llama" else 4
    model = assemble(ModelConfig(style, 2, 32, 4, kv_heads, 64, vocabulary=256, length=LENGTH, tied=True))
    initialize(model, 0, std=0.1)
    return model.double()


@pytest.mark.parametrize("style", ["llama", "gpt"])
@pytest.mark.parametrize("tiled", [False, True])
def test_packed_conversation_equals_conversation_in_its_own_row(conversations, style, tiled):
    model = small(style)
    if tiled:
        model = TiledAttention(tile=16).model(model)
    batch = batch_of(conversations, together=True, rows=3)
    packed = model.logits(batch["tokens"], batch["segments"])
    compared = 0
    for row in range(3):
        for segment in range(1, int(batch["segments"][row].max()) + 1):
            here = batch["segments"][row] == segment
            alone = model.logits(batch["tokens"][row, here][None])[0]
            torch.testing.assert_close(packed[row, here], alone, rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("by_tokens", [True, False])
def test_loss_and_gradient_do_not_depend_on_packing(conversations, by_tokens):
    found = []
    for together in (True, False):
        model = small("llama")
        batch = batch_of(conversations, together, by_tokens)
        loss = loss_of(model, batch, packed=together)
        loss.backward()
        found.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    assert len(batch) == 40
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "config", [FAMILIES["llama"], lambda: transformers.Qwen2Config(**SMALL, num_key_value_heads=2)]
)
def test_token_weighted_loss_equals_transformers(conversations, config):
    model = HuggingFaceCausalLM(random_model(with_room(config())))
    batch = batch_of(conversations, together=False, rows=6)
    tokens = torch.cat((batch["tokens"][:, :1], batch["targets"]), dim=1)
    ignored = torch.full((6, 1), -100)
    labels = torch.cat((ignored, batch["targets"].masked_fill(batch["share"] == 0, -100)), dim=1)
    expected = model.lm(input_ids=tokens, labels=labels).loss
    torch.testing.assert_close(loss_of(model, batch, packed=False), expected, rtol=1e-5, atol=1e-6)
    together = batch_of(conversations, together=True, rows=2)
    alone = find_objective("chat_answers", packed=True).predict(model, together).logits
    assert alone.shape[:2] == (2, LENGTH)


def with_room(config):
    config.max_position_embeddings = LENGTH + 1
    return config


EXPERTS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=2),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", ["llama-grouped", *EXPERTS])
def test_transformers_models_separate_packed_conversations(conversations, name):
    config = (FAMILIES | EXPERTS)[name]()
    model = HuggingFaceCausalLM(random_model(with_room(config)))
    batch = batch_of(conversations, together=True, rows=1)
    packed = model.logits(batch["tokens"], batch["segments"])
    for segment in range(1, int(batch["segments"].max()) + 1):
        here = batch["segments"][0] == segment
        torch.testing.assert_close(packed[0, here], model.logits(batch["tokens"][:, here])[0], rtol=1e-4, atol=1e-5)


def test_models_without_segment_masks_refuse_packing(conversations):
    batch = batch_of(conversations, together=True, rows=1)
    first = HuggingFaceCausalLM(random_model(FAMILIES["gpt1"]()))
    with pytest.raises(RefusedError, match="does not separate texts that are packed into one row"):
        first(batch["tokens"], batch["segments"])


def test_only_trained_tokens_have_a_gradient(conversations):
    model = small("llama")
    batch = batch_of(conversations, together=True, rows=2)
    objective = find_objective("chat_answers")
    prediction = objective.predict(model, batch)
    prediction.hidden.retain_grad()
    (objective.losses(prediction, batch) * batch.weight).sum().backward()
    assert torch.equal(prediction.hidden.grad.abs().sum(-1) > 0, batch["share"] > 0)
    assert objective.tokens(batch) == int((batch["segments"] > 0).sum())


def test_row_source_weights_match_the_loss(conversations):
    rows = PackedConversations(conversations, arrange_rows(conversations.sizes - 1, LENGTH, 0, True), LENGTH, 0)
    batch = WeightedSource(EpochSource(rows, 2, seed=0)).at(3)
    model = small("llama")
    objective = find_objective("chat_answers")
    logits = model.logits(batch["tokens"], batch["segments"])
    every = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    expected = every[batch["share"].flatten() > 0].mean()
    losses = objective.losses(objective.predict(model, batch), batch)
    torch.testing.assert_close((losses * batch.weight).sum().double(), expected, rtol=1e-5, atol=1e-6)


def test_unknown_setting_value_is_refused():
    with pytest.raises(UsageError, match=r"objective\.trained_on is 'answer'.*\n.*did you mean 'answers'"):
        find_objective("chat_answers", trained_on="answer")
    with pytest.raises(UsageError, match=r"objective\.weigh_by"):
        find_objective("chat_answers", weigh_by="rows")
