import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_models import FAMILIES, VOCABULARY

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.models import build_model, export_model, model_shape
from thrifty.models.text_generation import generate
from thrifty.models.transformer import Transformer
from thrifty.models.weight_conversion import export_folder, import_folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@torch.no_grad()
def test_an_imported_model_has_the_logits_of_transformers(family, tokens):
    folder, theirs = family
    ours, _ = import_folder(folder)
    torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(4)
@torch.no_grad()
def test_an_exported_model_generates_the_same_tokens(family, tokens, tokenizer_json, tmp_path):
    folder, _ = family
    ours, shape = import_folder(folder)
    export_folder(ours, shape, tmp_path / "ours", tokenizer_json)

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    prompt = torch.tensor([tokenizer("In the beginning")["input_ids"]])
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, eos_token_id=None
    )
    torch.testing.assert_close(generate(ours, prompt, 30, greedy=True), expected, rtol=0, atol=0)
    assert prompt.shape[1] < 10 and len(expected[0].unique()) > 3


@torch.no_grad()
def test_a_trained_model_exports_with_its_tokenizer(tokenizer_json, tmp_path, tokens):
    settings = ModelSettings(preset="llama-nano", depth=2, width=32)
    ours = build_model(settings, VOCABULARY, length=64, seed=3)
    export_model(ours, model_shape(settings, VOCABULARY, 64), tmp_path / "ours", tokenizer_json)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert tokenizer.convert_ids_to_tokens(tokenizer.bos_token_id) == "<|endoftext|>"
    assert theirs.config.eos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer("the word was")["input_ids"]) == "the word was"


def test_a_round_trip_is_bit_exact(family, tmp_path):
    folder, _ = family
    first, shape = import_folder(folder)
    export_folder(first, shape, tmp_path / "once")
    second, same_shape = import_folder(tmp_path / "once")
    export_folder(second, same_shape, tmp_path / "twice")
    assert shape == same_shape
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_export_keeps_every_tensor_of_transformers(family, tmp_path):
    folder, theirs = family
    ours, shape = import_folder(folder)
    export_folder(ours, shape, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_half_precision_round_trip(save, tmp_path):
    folder, _ = save(FAMILIES["llama-grouped"]())
    ours, shape = import_folder(folder)
    export_folder(ours, shape, tmp_path / "half", dtype=torch.bfloat16)
    again, _ = import_folder(tmp_path / "half")
    export_folder(again, shape, tmp_path / "half-again", dtype=torch.bfloat16)
    assert (tmp_path / "half" / "model.safetensors").read_bytes() == (
        tmp_path / "half-again" / "model.safetensors"
    ).read_bytes()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_a_tied_head_stays_tied(save):
    folder, _ = save(FAMILIES["llama-tied"]())
    model, shape = import_folder(folder)
    assert shape.tied and model.head.weight is model.embedding.token.weight
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama-grouped"])
def test_shards_are_imported_like_one_file(save, name, tokens):
    folder, theirs = save(FAMILIES[name](), max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, _ = import_folder(folder)
    torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_gpt2_as_first_published_without_prefix_is_imported(save, tokens):
    from safetensors.torch import load_file, save_file

    folder, theirs = save(FAMILIES["gpt2"]())
    path = folder / "model.safetensors"
    bare = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(bare, path)
    model, _ = import_folder(folder)
    torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_rope_settings_of_earlier_transformers_are_read(save, tokens):
    folder, theirs = save(FAMILIES["llama-scaled"]())
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(folder, rope_parameters="absent", rope_theta=theta, rope_scaling=rope)
    model, _ = import_folder(folder)
    torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "type 'yarn'"),
        ("llama", {"head_dim": 16}, "head_dim 16"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"new_trick": 2}, "new_trick = 2"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("gpt2", {"model_type": "gpt_neox"}, "model_type 'gpt_neox'"),
        ("gpt1", {"afn": "swish"}, "afn = 'swish'"),
    ],
)
def test_unsupported_settings_are_refused_by_name(save, name, changes, reason):
    folder, _ = save(FAMILIES[name]())
    edit_config(folder, **changes)
    with pytest.raises(RefusedError, match=reason):
        import_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "no hidden_size"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"num_attention_heads": 5, "head_dim": None}, "heads"),
    ],
)
def test_malformed_config_is_a_usage_error(save, changes, message):
    folder, _ = save(FAMILIES["llama"]())
    edit_config(folder, **changes)
    with pytest.raises(UsageError, match=message):
        import_folder(folder)


def test_pickled_weights_are_refused_unopened(save, tmp_path):
    folder, _ = save(FAMILIES["llama"]())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(UsageError, match="convert the weights to safetensors"):
        import_folder(folder)


def test_pickle_under_the_name_of_safetensors_is_refused(save):
    folder, theirs = save(FAMILIES["llama"]())
    torch.save(theirs.state_dict(), folder / "model.safetensors")
    with pytest.raises(IntegrityError, match="damaged"):
        import_folder(folder)


def test_truncated_weights_are_refused(save):
    folder, _ = save(FAMILIES["llama"]())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="damaged"):
        import_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, "unexpected"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"tie_word_embeddings": True}, "ties the head"),
        ({"intermediate_size": 44}, "according to config.json"),
        ({"vocab_size": 10}, "according to config.json"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(save, changes, message):
    folder, _ = save(FAMILIES["llama"]())
    edit_config(folder, **changes)
    with pytest.raises(IntegrityError, match=message):
        import_folder(folder)


def test_folders_without_a_model_are_named(tmp_path, save):
    with pytest.raises(UsageError, match="no model folder"):
        import_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no config\.json"):
        import_folder(tmp_path)
    folder, _ = save(FAMILIES["llama"]())
    (folder / "config.json").write_text("{broken")
    with pytest.raises(IntegrityError, match="JSON"):
        import_folder(folder)


def test_shard_names_cannot_leave_the_folder(save):
    folder, _ = save(FAMILIES["llama"](), max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="no shard name"):
        import_folder(folder)


def test_missing_shard_is_named(save):
    folder, _ = save(FAMILIES["llama"](), max_shard_size="20KB")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        import_folder(folder)


def test_export_never_overwrites(save, tmp_path):
    model, shape = import_folder(save(FAMILIES["llama"]())[0])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        export_folder(model, shape, tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    export_folder(model, shape, tmp_path / "empty")
    import_folder(tmp_path / "empty")


def test_a_failed_export_leaves_no_folder(save, tmp_path):
    model, shape = import_folder(save(FAMILIES["llama"]())[0])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(IntegrityError, match="tokenizer"):
        export_folder(model, shape, tmp_path / "ours", tokenizer_json=tmp_path / "no-tokenizer.json")
    assert sorted(tmp_path.iterdir()) == before


def test_parameters_outside_the_format_are_refused(save, tmp_path):
    model, shape = import_folder(save(FAMILIES["llama"]())[0])
    model.blocks[0].attention.qkv.register_parameter("lora_a", torch.nn.Parameter(torch.zeros(2, 32)))
    with pytest.raises(RefusedError, match="lora_a"):
        export_folder(model, shape, tmp_path / "ours")
    with pytest.raises(RefusedError, match="missing"):
        export_folder(model, replace(shape, depth=3), tmp_path / "ours")


def test_widths_outside_the_gpt1_format_are_refused(tmp_path):
    settings = ModelSettings(preset="gpt1-nano", depth=1, hidden=100)
    model = build_model(settings, 10, 8, seed=0)
    with pytest.raises(RefusedError, match="inner width of 4 times the width"):
        export_model(model, model_shape(settings, 10, 8), tmp_path / "ours")


def test_build_model_imports_a_folder_of_own_families(save, tokens):
    folder, theirs = save(FAMILIES["gpt2"]())
    model = build_model(ModelSettings(folder=str(folder)), VOCABULARY, 64, seed=0)
    assert isinstance(model, Transformer)
    torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_fresh_folder_uses_sizes_and_seed_of_the_recipe(save):
    folder, _ = save(FAMILIES["llama"]())
    settings = ModelSettings(folder=str(folder), reinitialize=True, depth=1)
    first, same, other = (build_model(settings, 50, 16, seed) for seed in (1, 1, 2))
    assert len(first.blocks) == 1 and first.head.weight.shape == (50, 32)
    assert torch.equal(first.head.weight, same.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize(
    ("settings", "vocabulary", "length", "message"),
    [
        ({"depth": 3}, 10, 8, "model.depth is set"),
        ({}, VOCABULARY + 1, 8, "tokenizer has 301 tokens"),
        ({}, 10, 65, "data.length is 65"),
    ],
)
def test_a_recipe_that_does_not_fit_weights_is_refused(save, settings, vocabulary, length, message):
    folder, _ = save(FAMILIES["llama"]())
    with pytest.raises(UsageError, match=message):
        build_model(ModelSettings(folder=str(folder), **settings), vocabulary, length, seed=0)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # importing it now fails
from pathlib import Path
from thrifty.models.hf_loader import load_causal_lm
from thrifty.models.weight_conversion import export_folder, import_folder
theirs, ours = map(Path, sys.argv[1:])
export_folder(*import_folder(theirs), ours)
load_causal_lm(ours)
"""


@pytest.mark.slow
def test_import_and_export_need_no_transformers(save, tmp_path):
    folder, _ = save(FAMILIES["llama"]())
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(folder), str(tmp_path / "ours")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert import_folder(tmp_path / "ours")[1] == import_folder(folder)[1]
    assert "UsageError" in done.stderr and "pip install 'thrifty[huggingface]'" in done.stderr
