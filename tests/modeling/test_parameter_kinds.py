"""The rules for weight decay, hidden matrices and fused layers."""

import pytest
import torch
import transformers
from tiny_runs import tiny_model
from torch import Tensor, nn

from thrifty.modeling.parameter_kinds import FusedSlices, fused_slices, is_hidden_matrix, is_matrix


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("blocks.0.attention.out.weight", (4, 4), True),
        ("embedding.token.weight", (4, 4), True),
        ("head.weight", (4, 4), True),
        ("conv.weight", (4, 4, 3, 3), True),
        ("norm.weight", (4,), False),
        ("mlp.up.bias", (4,), False),
        ("stacked.bias", (2, 4), False),
        ("embedding.position.weight", (4, 4), False),
        ("transformer.wpe.weight", (4, 4), False),
        ("vit.cls_token", (1, 1, 4), False),
        ("vit.pos_embed", (1, 5, 4), False),
        ("encoder.pos", (16, 4), False),
        ("positional_embedding", (16, 4), False),
        ("layers.0.pos_ffn.w_1.weight", (4, 4), True),
        ("decomposition.weight", (4, 4), True),
        ("block.0.SelfAttention.relative_attention_bias.weight", (32, 4), False),
        ("gain", (), False),
    ],
)
def test_weight_decay_applies_to_matrices_only(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert is_matrix(name, torch.zeros(shape)) == decayed


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_most_weights_of_own_models_are_decayed(style: str) -> None:
    named = dict(tiny_model(style=style).named_parameters())
    spared = {name for name, parameter in named.items() if not is_matrix(name, parameter)}
    assert spared == {name for name, p in named.items() if p.ndim == 1 or "position" in name}


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
MODELS = {
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=99, n_positions=16, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0
        ),
    ),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0)),
    "neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**SMALL)),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**SMALL, pad_token_id=0)),
    "bert, untied": (
        transformers.BertForMaskedLM,
        transformers.BertConfig(**SMALL, pad_token_id=0, tie_word_embeddings=False),
    ),
    "bert, classifying": (transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL, pad_token_id=0)),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=99),
    ),
    "vit": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(**{**SMALL, "image_size": 16, "patch_size": 8}),
    ),
}
ENDS = {
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "phi3": {"model.embed_tokens.weight", "lm_head.weight"},
    "neox": {"gpt_neox.embed_in.weight", "lm_head.weight"},
    "bert": {f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")},
    "bert, untied": {
        "cls.predictions.decoder.weight",
        *(f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")),
    },
    "bert, classifying": {
        "classifier.weight",
        *(f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")),
    },
    "t5": {
        "shared.weight",
        *(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")),
    },
    "vit": {
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.weight",
        "classifier.weight",
    },
}


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def meta_model(name: str) -> nn.Module:
    kind, configuration = MODELS[name]
    with torch.device("meta"):
        return kind(configuration)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_matrices_exclude_embeddings_and_heads(name: str) -> None:
    parameters = named(meta_model(name))
    assert {key for key, p in parameters.items() if p.ndim > 1 and not is_hidden_matrix(key, p)} == ENDS[name]


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_hidden_matrices_of_own_models_are_in_the_blocks(style: str) -> None:
    parameters = named(tiny_model(style=style, tied=False))
    hidden = {name for name, parameter in parameters.items() if is_hidden_matrix(name, parameter)}
    assert hidden == {
        name for name, parameter in parameters.items() if parameter.ndim == 2 and name.startswith("blocks.")
    }


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("blocks.0.multi_head_attention.q.weight", True),
        ("decoder.layers.0.fc1.weight", True),
        ("decoder.output.dense.weight", True),
        ("fc.weight", False),
        ("output.weight", False),
        ("model.heads.head.weight", False),
        ("bert.pooler.dense.weight", True),
    ],
)
def test_names_of_ends_match_whole_words_only(name: str, hidden: bool) -> None:
    assert is_hidden_matrix(name, torch.zeros(4, 4)) == hidden


def slices_of(model: nn.Module) -> dict[str, FusedSlices]:
    parameters = named(model)
    slices = fused_slices(list(parameters), list(parameters.values()))
    return {name: cut for name, cut in zip(parameters, slices, strict=True) if cut is not None}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt2", {"transformer.h.0.attn.c_attn.weight": FusedSlices(1, (32, 32, 32))}),
        ("llama", {}),
        (
            "phi3",
            {
                "model.layers.0.self_attn.qkv_proj.weight": FusedSlices(0, (32, 16, 16)),
                "model.layers.0.mlp.gate_up_proj.weight": FusedSlices(0, (48, 48)),
            },
        ),
        ("neox", {}),  # its heads are interleaved
        ("bert", {}),
        ("t5", {}),
        ("vit", {}),
    ],
)
def test_fused_layers_of_transformers_are_found(name: str, wanted: dict[str, FusedSlices]) -> None:
    assert slices_of(meta_model(name)) == wanted


def test_fused_layers_of_own_models_are_found() -> None:
    llama, gpt = slices_of(tiny_model(depth=1, style="llama")), slices_of(tiny_model(depth=1, style="gpt"))
    assert llama == {
        "blocks.0.attention.qkv.weight": FusedSlices(0, (32, 16, 16)),
        "blocks.0.mlp.up.weight": FusedSlices(0, (64, 64)),
    }
    assert gpt == {"blocks.0.attention.qkv.weight": FusedSlices(0, (32, 32, 32))}


def test_fused_layers_of_torchs_attention_are_found() -> None:
    assert slices_of(nn.MultiheadAttention(8, 2)) == {"in_proj_weight": FusedSlices(0, (8, 8, 8))}


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (
            {"a.qkv.weight": (24, 16), "a.out.weight": (16, 8)},
            {"a.qkv.weight": FusedSlices(0, (8, 8, 8))},
        ),  # narrow heads
        (
            {"a.kv.weight": (32, 16), "a.q.weight": (16, 16), "a.out.weight": (16, 16)},
            {"a.kv.weight": FusedSlices(0, (16, 16))},
        ),
        ({"a.c_attn.weight": (24, 8)}, {"a.c_attn.weight": FusedSlices(0, (8, 8, 8))}),  # stored as in a linear layer
        ({"a.qkv.weight": (16, 16), "a.out.weight": (16, 16)}, {}),
        ({"a.up.weight": (64, 16), "b.down.weight": (16, 32)}, {}),
    ],
)
def test_slices_follow_from_the_next_layer(shapes: dict[str, tuple[int, int]], wanted: dict[str, FusedSlices]) -> None:
    slices = fused_slices(list(shapes), [torch.zeros(shape) for shape in shapes.values()])
    assert {name: cut for name, cut in zip(shapes, slices, strict=True) if cut} == wanted
