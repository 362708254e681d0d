"""Encoders and encoder-decoders that only transformers supports, with the interface of Thrifty's models."""

import json

import pytest
import torch
import transformers
from tiny_models import SMALL, TWO_SIDED, VOCABULARY, random_model

from thrifty.core.errors import RefusedError, UsageError, class_name
from thrifty.core.recipe import ModelSettings
from thrifty.models import build_model, export_model
from thrifty.models.hf_loader import HuggingFaceMaskedLM, HuggingFaceSeq2Seq, load_model
from thrifty.models.text_generation import generate

SIDES = {
    "d_model": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))},
}  # fmt: skip
MASKED, PAIRED = transformers.AutoModelForMaskedLM, transformers.AutoModelForSeq2SeqLM
ARCHITECTURES = {
    "distilbert": lambda: (
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64
        ),
        MASKED,
    ),
    "roberta": lambda: (transformers.RobertaConfig(**(SMALL | {"pad_token_id": 1})), MASKED),
    "bart": lambda: (transformers.BartConfig(**SIDES), PAIRED),
    "mt5": lambda: (
        transformers.MT5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        PAIRED,
    ),
}
HEAD_APART = {"bart"}  # the others have a layer or a scale between hidden states and head


@pytest.fixture(params=ARCHITECTURES)
def architecture(request, tmp_path):
    config, auto = ARCHITECTURES[request.param]()
    theirs = random_model(config, auto=auto)
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.zero_()
    theirs.save_pretrained(tmp_path / "theirs")
    task = "masked_token" if auto is MASKED else "sequence_to_sequence"
    return request.param, tmp_path / "theirs", theirs, task


@pytest.fixture
def texts(tokens):
    keep = torch.ones(2, 24, dtype=torch.bool)
    keep[0, 15:] = False
    return tokens.clamp(min=4), tokens[:, :9].clamp(min=4), keep


def given(task, texts):
    source, target, keep = texts
    return (source, keep) if task == "masked_token" else (source, target, keep)


def expected_logits(theirs, task, texts):
    source, target, keep = texts
    named = {} if task == "masked_token" else {"decoder_input_ids": target}
    return theirs(input_ids=source, attention_mask=keep.long(), **named).logits


@torch.no_grad()
def test_any_architecture_has_the_interface_of_own_models(architecture, texts):
    name, folder, theirs, task = architecture
    model = load_model(folder, task).eval()
    assert type(model) is (HuggingFaceMaskedLM if task == "masked_token" else HuggingFaceSeq2Seq)
    assert class_name(model) == type(theirs).__name__
    assert (model.head is not None) == (name in HEAD_APART)
    out, expected = model(*given(task, texts)), expected_logits(theirs, task, texts)
    torch.testing.assert_close(out if model.head is None else model.head(out), expected)
    torch.testing.assert_close(model.logits(*given(task, texts)), expected)


@torch.no_grad()
def test_a_bias_after_the_head_is_included(tmp_path, texts):
    config, auto = ARCHITECTURES["bart"]()
    theirs = random_model(config, auto=auto)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, "sequence_to_sequence").eval()
    assert model.head is None
    torch.testing.assert_close(model(*texts), expected_logits(theirs, "sequence_to_sequence", texts))


def test_an_export_loads_in_transformers(architecture, tokenizer_json, tmp_path, texts):
    _, folder, theirs, task = architecture
    export_model(load_model(folder, task), None, tmp_path / "ours", tokenizer_json)
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(expected_logits(again, task, texts), expected_logits(theirs, task, texts))
    assert again.config.eos_token_id == 0
    if task == "sequence_to_sequence":
        assert again.config.decoder_start_token_id == 0


def test_build_model_wraps_unsupported_families(architecture):
    _, folder, _, task = architecture
    model = build_model(ModelSettings(folder=str(folder)), VOCABULARY, 32, seed=0, task=task)
    assert model.task == task and model.vocabulary == VOCABULARY
    fresh = build_model(ModelSettings(folder=str(folder), reinitialize=True), 50, 32, seed=0, task=task)
    assert fresh.vocabulary == 50


def test_a_folder_without_a_model_for_the_task_is_refused(architecture):
    name, folder, _, task = architecture
    other = "sequence_to_sequence" if task == "masked_token" else "next_token"
    with pytest.raises(RefusedError):
        load_model(folder, other)
    if name == "distilbert":
        with pytest.raises(RefusedError, match="sequence-to-sequence model of type 'distilbert'"):
            load_model(folder, other)
    with pytest.raises(UsageError, match="cannot learn classification"):
        build_model(ModelSettings(folder=str(folder)), VOCABULARY, 32, seed=0, task="classification")


def test_a_causal_model_cannot_fill_in_masked_tokens(tmp_path):
    config = transformers.BertConfig(**SMALL, is_decoder=True)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_decoder"]
    with pytest.raises(RefusedError, match="does not attend to later tokens"):
        load_model(tmp_path, "masked_token", fresh=True)


@pytest.mark.parametrize("task", ["masked_token", "sequence_to_sequence"])
def test_generation_refuses_models_of_other_tasks(save, task):
    name = "bert" if task == "masked_token" else "t5-1.0"
    ours = build_model(ModelSettings(folder=str(save(TWO_SIDED[name]())[0])), VOCABULARY, 32, seed=0, task=task)
    with pytest.raises(UsageError, match=f"trained for {task}"):
        generate(ours, torch.zeros(1, 3, dtype=torch.long), 2)
