"""GGUF files written with the package gguf, compared with their original models."""

import json

import gguf
import numpy as np
import pytest
import torch
from tiny_models import random_model
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.data.catalogue import entry
from thrifty.models.gguf_import import convert_gguf, half_split
from thrifty.models.text_generation import generate
from thrifty.models.weight_conversion import import_folder

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
OURS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # tokens of bytes
    return [*WORDS, *letters, *(merge.replace(" ", "") for merge in MERGES)]


def original(tied=True):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(vocabulary()), max_position_embeddings=128, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    )  # fmt: skip
    return random_model(config)


def neighbouring(matrix, heads):
    """Return rows in the order for rotations of adjacent channels, as llama.cpp's converter writes them."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def write(path, model, splitter="smollm", blocks=None, left_out=""):
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary()) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, values in model.state_dict().items():
        stored = gguf_name(name)
        if stored == left_out or (stored == "output.weight" and config.tie_word_embeddings):
            continue
        array = values.numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if (part := stored.split(".")[-2]) in heads:
            array = neighbouring(array, heads[part])
        if blocks is not None and array.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(array, blocks), raw_dtype=blocks)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name):
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    name = name.removesuffix(".weight")
    if name in outside:
        return f"{outside[name]}.weight"
    _, _, block, part = name.split(".", 3)
    return f"blk.{block}.{OURS[part]}.weight"


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_folder_equals_the_original_model(tmp_path, tied):
    model = original(tied)
    shape = convert_gguf(write(tmp_path / "a.gguf", model), tmp_path / "folder")
    assert shape.norm_eps == 1e-5 and shape.rope_base == 50_000.0 and shape.tied is tied
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items())
    ours, _ = import_folder(tmp_path / "folder")
    tokens = torch.randint(len(vocabulary()), (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours.logits(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_blocks_are_dequantized(tmp_path, blocks):
    model = original()
    convert_gguf(write(tmp_path / "a.gguf", model, blocks=blocks), tmp_path / "folder")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    stored = neighbouring(model.state_dict()[name].numpy(), 4)
    expected = half_split(torch.from_numpy(gguf.dequantize(gguf.quantize(stored, blocks), blocks).copy()), 4)
    assert torch.equal(state[name], expected)
    error = (state[name] - model.state_dict()[name]).norm() / state[name].norm()
    assert 1e-4 < error < 0.15


def test_row_order_is_restored():
    rows = torch.arange(24.0)[:, None].repeat(1, 3)
    assert torch.equal(half_split(torch.from_numpy(neighbouring(rows.numpy(), 3)), 3), rows)


def test_the_tokenizer_is_converted_with_its_template(tmp_path):
    convert_gguf(write(tmp_path / "a.gguf", original()), tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    words = vocabulary()
    assert [words[token] for token in tokenizer("the the<|im_end|>").input_ids] == ["the", "Ġthe", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("naïve 🙂 the\n").input_ids) == "naïve 🙂 the\n"
    assert tokenizer.eos_token_id == 2 and tokenizer.bos_token_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["eos_token_id"] == 2
    digits = [words[token] for token in tokenizer("12").input_ids]
    convert_gguf(write(tmp_path / "b.gguf", original(), splitter="gpt-2"), tmp_path / "other")
    together = [words[token] for token in AutoTokenizer.from_pretrained(tmp_path / "other")("12").input_ids]
    assert digits == ["1", "2"] and together == ["12"]


def test_a_refused_conversion_leaves_no_folder(tmp_path):
    with pytest.raises(RefusedError, match="tokenizer of kind 'gpt2' with 'llama-bpe'"):
        convert_gguf(write(tmp_path / "a.gguf", original(), splitter="llama-bpe"), tmp_path / "folder")
    missing = write(tmp_path / "b.gguf", original(), left_out="blk.1.ffn_up.weight")
    with pytest.raises(IntegrityError, match="do not match its settings"):
        convert_gguf(missing, tmp_path / "folder")
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + b"\0" * 5)
    (tmp_path / "d.gguf").write_bytes(b"no such thing at all")
    for name in "cd":
        with pytest.raises(IntegrityError, match="not a readable GGUF file"):
            convert_gguf(tmp_path / f"{name}.gguf", tmp_path / "folder")
    other = gguf.GGUFWriter(tmp_path / "e.gguf", "bert")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    with pytest.raises(RefusedError, match="'bert' model; only 'llama' can be converted"):
        convert_gguf(tmp_path / "e.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


FETCHED = entry("smollm2-135m").model_folder


@pytest.mark.skipif(not (FETCHED / "config.json").is_file(), reason="needs: thrifty data get smollm2-135m")
def test_smollm2_knows_the_capital_of_france():
    model, shape = import_folder(FETCHED)
    tokenizer = AutoTokenizer.from_pretrained(FETCHED)
    prompt = torch.tensor([tokenizer("The capital of France is").input_ids])
    assert shape.depth == 30 and shape.kv_heads == 3
    assert tokenizer.decode(generate(model, prompt, 2, greedy=True)[0]) == "The capital of France is Paris."
    theirs = AutoModelForCausalLM.from_pretrained(FETCHED)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(prompt), theirs(prompt).logits, rtol=1e-4, atol=1e-3)
