"""A config.json with impossible values is refused with the name of the setting, never with a traceback."""

import json
import math
from pathlib import Path

import pytest

from thrifty.core.errors import RefusedError, ThriftyError
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.models.hf_loader import load_model
from thrifty.models.model_resolution import shape_for

BLOCKS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
SEEING = {"image_size": 32, "patch_size": 8}
CONFIGS = [
    {"model_type": "llama", **BLOCKS, "vocab_size": 300, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "head_dim": 16},
    {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 300, "n_positions": 64},
    {"model_type": "t5", "d_model": 64, "num_heads": 4, "num_layers": 2, "d_ff": 128, "vocab_size": 300, "d_kv": 16},
    {"model_type": "vit", **BLOCKS, **SEEING, "num_channels": 3, "id2label": {"0": "a", "1": "b"}},
    {"model_type": "clip", "text_config": BLOCKS, "vision_config": {**BLOCKS, **SEEING}, "projection_dim": 32},
]
OTHERS = ("hidden_act", "rope_scaling", "rope_parameters", "num_key_value_heads", "tie_word_embeddings")
EXTREMES = [[], [[1]], {"a": []}, "x", True, -1, 10**9, 10**400, 1e308, math.nan, math.inf, 1.5, [8, "a"], [{}]]


def shape(folder: Path) -> object:
    return shape_for(TextModelSpec(300, 16), ModelSettings(folder=str(folder), reinitialize=True))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_no_config_value_raises_a_traceback(config: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape(tmp_path) is not None
    for key in (*config, *OTHERS):
        for value in EXTREMES:
            (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                shape(tmp_path)
            except ThriftyError as error:
                assert error.what and len(str(error)) < 1000


@pytest.mark.parametrize("changes", [{"hidden_act": 0}, {"num_attention_heads": 10**12}, {"model_type": "x"}], ids=str)
def test_any_error_of_transformers_is_a_refusal(changes: dict, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[0], "vocab_size": 300, **changes}))
    with pytest.raises(RefusedError, match=r"transformers cannot build a .*\n  fix: pass a folder"):
        load_model(tmp_path, fresh=True)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"[]", b'{"vocab_size": 1' + b"0" * 5000 + b"}"])
def test_a_config_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ThriftyError, match=r"config\.json' (cannot be read as JSON|contains no JSON object)"):
        shape(tmp_path)


def test_a_model_type_that_is_no_string_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
    with pytest.raises(ThriftyError, match=r"config\.json: model_type is \['llama'\].*\n.*name one family"):
        shape(tmp_path)
