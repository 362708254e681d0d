"""Published initialization laws, compared with transformers and with their formulas."""

import math

import pytest
import torch
import transformers

from thrifty.core.randomness import keyed_generator
from thrifty.core.recipe import ModelSettings
from thrifty.models import build_model
from thrifty.models.weight_conversion import import_folder

TASKS = {"bert": "masked_token", "t5": "sequence_to_sequence", "marian": "sequence_to_sequence"}


def first_values(preset, seed=0, vocabulary=500, **sizes):
    settings = ModelSettings(preset=preset, **sizes)
    model = build_model(settings, vocabulary, 64, seed, TASKS.get(preset.split("-")[0], "next_token"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def spread_of(values):
    return values.std().item()


def test_gpt2_and_llama_sample_each_matrix_from_its_generator():
    for preset in ("gpt-nano", "llama-nano"):
        for name, values in first_values(preset, seed=3, depth=2).items():
            if values.ndim > 1:
                residual = 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0  # 1 / sqrt(2 · 2 blocks)
                generator = keyed_generator(f"3/{name}")
                assert torch.equal(values, torch.empty_like(values).normal_(0, 0.02 * residual, generator=generator))


@pytest.mark.parametrize("preset", ["gpt1-nano", "bert-nano"])
def test_gpt1_and_bert_have_one_standard_deviation(preset):
    for name, values in first_values(preset).items():
        if values.ndim > 1:
            assert spread_of(values) == pytest.approx(0.02, rel=0.2 if "token_type" in name else 0.05), name


@pytest.mark.parametrize("preset", ["gpt-nano", "gpt1-nano", "bert-nano", "t5-nano", "marian-nano"])
def test_gains_are_one_and_biases_zero(preset):
    for name, values in first_values(preset, depth=1).items():
        if values.ndim == 1:
            assert torch.equal(values, torch.full_like(values, 0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize("gated", [False, True])
def test_t5_initialization_equals_transformers(gated, tmp_path):
    """Spread of every common matrix, with queries separate from keys and values."""
    config = transformers.T5Config(
        vocab_size=500, d_model=128, d_kv=32, d_ff=512, num_heads=4, num_layers=2,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    theirs = dict(import_folder(tmp_path)[0].named_parameters())
    settings = ModelSettings(folder=str(tmp_path), reinitialize=True)
    ours = dict(build_model(settings, 500, 64, seed=0, task="sequence_to_sequence").named_parameters())
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        if values.ndim > 1:
            parts = 3 if "qkv" in name else 1
            for mine, wanted in zip(values.chunk(parts), theirs[name].chunk(parts), strict=True):
                assert spread_of(mine) == pytest.approx(spread_of(wanted), rel=0.2 if "scores" in name else 0.05), name


def test_an_untied_t5_head_has_logits_of_unit_variance():
    values = first_values("t5-v1.1-small", depth=1, width=128, heads=2)
    assert spread_of(values["head.weight"]) == pytest.approx(128**-0.5, rel=0.05)


def test_the_original_transformer_initializes_parts_separately():
    values = first_values("marian-nano", depth=1)
    assert spread_of(values["embedding.token.weight"]) == pytest.approx(128**-0.5, rel=0.05)
    for name, rows, columns in (
        ("encoder.blocks.0.attention.qkv", 128, 128),  # as three matrices, not as one of 384 rows
        ("decoder.blocks.0.cross_attention.kv", 128, 128),
        ("decoder.blocks.0.cross_attention.q", 128, 128),
        ("decoder.blocks.0.mlp.up", 512, 128),
        ("decoder.blocks.0.mlp.down", 128, 512),
    ):
        bound = math.sqrt(6 / (rows + columns))
        drawn = values[f"{name}.weight"]
        assert 0.99 * bound < drawn.abs().max() <= bound
        assert spread_of(drawn) == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("preset", ["bert-nano", "t5-nano", "marian-nano"])
def test_initial_values_depend_on_seed_and_name_only(preset):
    short, tall, other = (first_values(preset, seed, depth=depth) for seed, depth in ((0, 1), (0, 3), (1, 1)))
    for name, values in short.items():
        assert torch.equal(values, tall[name]), name
        if values.ndim > 1:
            assert not torch.equal(values, other[name]), name
