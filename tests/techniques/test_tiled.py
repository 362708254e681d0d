"""Tiled attention in models of transformers: the loss and the gradients of their own attention."""

import copy
import random

import pytest
import torch
import transformers
from tests.support.drawn_models import LENGTH, Rows, built, classified, own_loss, sizes_of
from torch.utils.data import default_collate

from thrifty.core.errors import RefusedError
from thrifty.techniques.adapters.prefix_tuning import PrefixTuning
from thrifty.techniques.attention.tiled import TiledAttention

VOCABULARY = 64
MODELS = [
    ("BertForMaskedLM", "Bert", "masked"),
    ("DebertaV2ForMaskedLM", "DebertaV2", "masked"),
    ("T5ForConditionalGeneration", "T5", "seq2seq"),
    ("LlamaForCausalLM", "Llama", "causal"),
    ("ViTForImageClassification", "ViT", "vision"),
    ("SwinForImageClassification", "Swin", "vision"),
]


@pytest.mark.parametrize(("name", "family", "kind"), MODELS, ids=[name for name, *_ in MODELS])
def test_loss_and_gradients_equal_those_of_transformers(name: str, family: str, kind: str) -> None:
    torch.manual_seed(0)
    plain = built(getattr(transformers, name), sizes_of(random.Random(1), family, kind, VOCABULARY)).eval()
    batch = default_collate([Rows(0 if kind == "vision" else VOCABULARY)[index] for index in range(3)])
    if kind != "vision":
        batch["attention_mask"] = torch.ones(3, LENGTH, dtype=torch.int64)
        batch["attention_mask"][1, -4:] = batch["attention_mask"][2, :3] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    found = []
    for model in (plain, TiledAttention(tile=5).model(copy.deepcopy(plain))):
        loss = classified(model, batch) if kind == "vision" else own_loss(model, batch)
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append((loss.detach(), gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_cached_keys_are_attended_to(name: str, cache: str) -> None:
    family = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    plain = built(getattr(transformers, name), sizes_of(random.Random(1), family, "causal", VOCABULARY)).eval()
    tiled = TiledAttention(tile=5).model(copy.deepcopy(plain))
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    texts = [each.generate(tokens, max_new_tokens=5, do_sample=False, cache_implementation=cache, output_logits=True,
                           return_dict_in_generate=True) for each in (plain, tiled)]  # fmt: skip
    torch.testing.assert_close(texts[1].logits, texts[0].logits)
    prefixed = []
    for model in (plain, tiled):
        torch.manual_seed(2)
        prefixed.append(PrefixTuning(tokens=2).model(model)(tokens).logits)
    torch.testing.assert_close(prefixed[1], prefixed[0])


def test_masks_that_show_later_tokens_are_followed() -> None:
    plain = built(transformers.LlamaForCausalLM, sizes_of(random.Random(1), "Llama", "causal", VOCABULARY)).eval()
    tiled = TiledAttention(tile=5).model(copy.deepcopy(plain))
    tokens, mask = torch.randint(3, VOCABULARY, (2, 6)), torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., :3, :3] = True
    expected, actual = (model(tokens, attention_mask=mask).logits for model in (plain, tiled))
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(expected, plain(tokens).logits)


def test_a_changed_core_is_not_replaced() -> None:
    model = built(transformers.ViTForImageClassification, sizes_of(random.Random(1), "ViT", "vision", 0))
    with pytest.raises(RefusedError, match="such as a prefix, has changed"):
        TiledAttention().model(PrefixTuning(tokens=2).model(model))
