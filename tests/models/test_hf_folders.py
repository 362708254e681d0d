import os
import stat
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import SMALL, VOCABULARY
from torch.utils.checkpoint import checkpoint

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.modeling.module_surgery import find_blocks, wrap_forward
from thrifty.models import build_model, export_model
from thrifty.models.hf_loader import HuggingFaceCausalLM, load_causal_lm
from thrifty.models.text_generation import generate

GROUPED = SMALL | {"num_key_value_heads": 2}
ARCHITECTURES = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.2,
        do_layer_norm_before=True,
        dropout=0.0,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, query_pre_attn_scalar=8),
    "cohere": lambda: transformers.CohereConfig(**GROUPED),
}
HEAD_NOT_APART = {"gemma2", "cohere"}  # soft cap and scale of the logits


@pytest.fixture(params=ARCHITECTURES)
def architecture(request, save):
    folder, theirs = save(ARCHITECTURES[request.param]())
    return request.param, folder, theirs


@torch.no_grad()
def test_any_architecture_has_the_interface_of_own_models(architecture, tokens):
    name, folder, theirs = architecture
    model = load_causal_lm(folder).eval()
    expected = theirs(tokens).logits
    assert (model.head is None) == (name in HEAD_NOT_APART)
    out = model(tokens)
    torch.testing.assert_close(out if model.head is None else model.head(out), expected)
    torch.testing.assert_close(model.logits(tokens), expected)


def test_parameters_keep_their_names_under_one_prefix(architecture):
    _, folder, theirs = architecture
    model = load_causal_lm(folder)
    assert {name for name, _ in model.named_parameters()} == {f"lm.{name}" for name, _ in theirs.named_parameters()}
    assert set(model.state_dict()) == {f"lm.{name}" for name in theirs.state_dict()}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_loads_in_transformers(architecture, tokenizer_json, tmp_path, dtype):
    _, folder, theirs = architecture
    export_model(load_causal_lm(folder), None, tmp_path / "ours", tokenizer_json, dtype)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and again.dtype == dtype
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.to(dtype), again.state_dict()[name]), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "ours").eos_token_id == 0


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_have_the_permissions_of_their_folder(mask, mode, save, tokenizer_json, tmp_path):
    folder, _ = save(ARCHITECTURES["llama"]())
    before = os.umask(mask)
    try:
        export_model(load_causal_lm(folder), None, tmp_path / "ours", tokenizer_json)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ours").iterdir()} == {mode}


@pytest.mark.parametrize(("base", "exported"), [(5, 0), ([5, 7], 0), ([5, 0], [5, 0]), (None, 0)])
def test_generation_of_an_export_stops_at_its_end_token(base, exported, save, tokenizer_json, tmp_path):
    folder, theirs = save(ARCHITECTURES["llama"]())
    theirs.generation_config.eos_token_id = base
    theirs.generation_config.pad_token_id = 9
    theirs.generation_config.save_pretrained(folder)
    for name, kept in (("ours", folder), ("other", None)):
        export_model(load_causal_lm(folder), None, tmp_path / name, tokenizer_json, base=kept)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config
    assert (again.eos_token_id, again.pad_token_id) == (exported, 9)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other").generation_config  # another tokenizer
    assert (again.eos_token_id, again.pad_token_id) == (0, None)


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "gemma2"])
def test_greedy_text_equals_transformers(name, save, tokens):
    folder, theirs = save(ARCHITECTURES[name]())
    prompt = tokens[:1, :5]
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    assert torch.equal(generate(load_causal_lm(folder), prompt, 12, greedy=True), expected)


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "qwen3"])
def test_recomputed_blocks_give_the_same_gradients(name, save, tokens):
    folder, _ = save(ARCHITECTURES[name]())
    gradients = []
    for recompute in (False, True):
        model = load_causal_lm(folder).train()
        path, blocks = find_blocks(model)
        assert path.startswith("lm.") and len(blocks) == 2
        if recompute:
            for block in blocks:
                wrap_forward(
                    block, lambda module, inner, *args, **kw: checkpoint(inner, *args, use_reentrant=False, **kw)
                )
        torch.manual_seed(0)
        model.logits(tokens).logsumexp(-1).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_logits(save, tokens):
    folder, theirs = save(ARCHITECTURES["gpt_neox"]())
    model = load_causal_lm(folder).eval()
    for block in find_blocks(model)[1]:
        block.compile()
    torch.testing.assert_close(model.head(model(tokens)), theirs(tokens).logits)


def test_a_fresh_model_uses_vocabulary_and_seed_of_the_run(save):
    folder, _ = save(ARCHITECTURES["gpt_neox"]())
    (folder / "model.safetensors").unlink()
    settings = ModelSettings(folder=str(folder), reinitialize=True)
    first, same, other = (build_model(settings, 50, 128, seed) for seed in (1, 1, 2))
    assert isinstance(first, HuggingFaceCausalLM) and first.vocabulary == 50
    assert first(torch.zeros(1, 128, dtype=torch.long)).shape == (1, 128, 32)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_special_tokens_outside_a_small_vocabulary_are_dropped(save):
    folder, _ = save(transformers.GPTNeoXConfig(**(SMALL | {"eos_token_id": 250, "pad_token_id": 251})))
    assert load_causal_lm(folder, fresh=True, vocabulary=50).lm.config.eos_token_id is None


def test_building_keeps_the_callers_random_state(save):
    folder, _ = save(ARCHITECTURES["opt"]())
    before = torch.get_rng_state()
    build_model(ModelSettings(folder=str(folder), reinitialize=True), VOCABULARY, 16, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unsupported_llama_is_built_by_transformers(save, tokens):
    folder, theirs = save(transformers.LlamaConfig(**SMALL, attention_bias=True))
    model = build_model(ModelSettings(folder=str(folder)), VOCABULARY, 64, seed=0).eval()
    assert isinstance(model, HuggingFaceCausalLM)
    torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits)


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="attends to later tokens"):
        load_causal_lm(tmp_path, fresh=True)


def test_code_in_the_folder_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(RefusedError, match="'own'"):
        load_causal_lm(tmp_path, fresh=True)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_refused_unopened(save):
    folder, _ = save(ARCHITECTURES["opt"]())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match="convert the weights to safetensors"):
        load_causal_lm(folder)


def test_a_folder_with_missing_weights_is_refused(save):
    from safetensors.torch import load_file, save_file

    folder, _ = save(ARCHITECTURES["gpt_neox"]())
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="lacks the values of 1 parameters"):
        load_causal_lm(folder)


@pytest.mark.parametrize(
    ("settings", "vocabulary", "length", "message"),
    [
        ({"depth": 3}, 10, 8, "model.depth is set"),
        ({"depth": 3, "reinitialize": True}, 10, 8, "determines the sizes"),
        ({}, VOCABULARY + 1, 8, "tokenizer has 301 tokens"),
        ({}, 10, 65, "data.length is 65"),
    ],
)
def test_a_recipe_that_does_not_fit_the_folder_is_refused(save, settings, vocabulary, length, message):
    folder: Path = save(ARCHITECTURES["gpt_neox"]())[0]
    with pytest.raises(UsageError, match=message):
        build_model(ModelSettings(folder=str(folder), **settings), vocabulary, length, seed=0)
