"""Llama (Touvron et al. 2023, arXiv 2302.13971): a pre-norm decoder with rotary positions and gated feed-forward
networks."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.kernels.rotary_embedding import rotary_frequencies
from thrifty.models.attention_layers import Attention, RotaryPositions
from thrifty.models.families.model_family import Config, ModelFamily, ParameterPacking, flag, number, table
from thrifty.models.model_config import ModelConfig
from thrifty.models.scaled_rotary import Llama3Scaling
from thrifty.models.transformer import Transformer
from thrifty.models.transformer_blocks import GatedFeedForward, TokenEmbedding, TransformerBlock

_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
}


def _rotary(shape: ModelConfig) -> RotaryPositions:
    # computed on the CPU even for a meta model: the table follows from the shape, and no file contains it
    frequencies = rotary_frequencies(shape.head_width, shape.rope_base, torch.device("cpu"))
    if shape.rope_scaling is not None:
        frequencies = shape.rope_scaling.slowed(frequencies)
    return RotaryPositions(frequencies, shape.length)


def _block(shape: ModelConfig, position: RotaryPositions) -> TransformerBlock:
    return TransformerBlock(
        nn.RMSNorm(shape.width, eps=shape.norm_eps),
        Attention(shape.width, shape.heads, shape.kv_heads, position=position, head_width=shape.head_width),
        nn.RMSNorm(shape.width, eps=shape.norm_eps),
        GatedFeedForward(shape.width, shape.hidden, nn.SiLU()),
    )


class Llama(ModelFamily):
    """Llama (Touvron et al. 2023): a pre-norm decoder with rotary positions and gated feed-forward networks.

    Paper       Touvron et al. 2023, LLaMA: Open and Efficient Foundation Language Models (arXiv 2302.13971).
    Promise     Logits for folders with `model_type` "llama" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("llama-nano", "my.txt", budget="2000 steps")
                thrifty.export(run, "my-llama")
    Start with  `llama-nano` for a first run, `llama-small` for the size of GPT-2 small.
    Cost        Attention is quadratic in the length. Grouped-query attention saves memory in generation.
    Avoid       Masked-token objectives, because attention is causal.
    Does not    Extend the context length, unless the preset has a rotary scaling.
    """

    style, model_type, architecture, task = "llama", "llama", "LlamaForCausalLM", "next_token"
    free_heads = True
    fields: ClassVar = {
        "depth": ("num_hidden_layers", None),
        "width": ("hidden_size", None),
        "heads": ("num_attention_heads", None),
        "hidden": ("intermediate_size", None),
        "vocabulary": ("vocab_size", None),
        "length": ("max_position_embeddings", 2048),
        "norm_eps": ("rms_norm_eps", 1e-6),
    }
    read = frozenset(
        {"head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"}
    )
    only: ClassVar = {"hidden_act": ("silu", "swish")}
    ignored = frozenset({"is_llama_config", "pretraining_tp"})
    body, token = "model.", "model.embed_tokens.weight"
    left_out = r"\.rotary_emb\.inv_freq$"

    def assemble(self, shape: ModelConfig) -> Transformer:
        position = _rotary(shape)  # one table for all blocks
        return Transformer(
            TokenEmbedding(shape.vocabulary, shape.width),
            [_block(shape, position) for _ in range(shape.depth)],
            nn.RMSNorm(shape.width, eps=shape.norm_eps),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
        )

    def shape(self, config: Config) -> ModelConfig:
        fields = self.read_fields(config)
        heads, width = fields["heads"], fields["width"]
        head_width = number(config, "head_dim", int, width // heads)
        is_narrower = config.get("head_dim") is not None and head_width * heads < width  # after pruning of heads
        if head_width * heads != width and not is_narrower:
            raise RefusedError(
                f"config.json: {heads} heads of head_dim {head_width} do not equal the width {width}",
                fix="pass the folder of a Llama model in which heads · head_dim equals the width",
            )
        base, scaling = _rope(config)
        return ModelConfig(
            style=self.style,
            kv_heads=number(config, "num_key_value_heads", int, heads),
            tied=flag(config, "tie_word_embeddings", False),
            fixed_head_width=head_width if is_narrower else None,
            rope_base=base,
            rope_scaling=scaling,
            **fields,
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default"}
        if shape.rope_scaling is not None:
            rope = {
                "rope_type": "llama3",
                "factor": shape.rope_scaling.factor,
                "low_freq_factor": shape.rope_scaling.low,
                "high_freq_factor": shape.rope_scaling.high,
                "original_max_position_embeddings": shape.rope_scaling.original,
            }
        return self.written_fields(shape) | {
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_width,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": rope | {"rope_theta": shape.rope_base},
            "rope_theta": shape.rope_base,  # the older key, for readers that do not know rope_parameters
            "rope_scaling": None if shape.rope_scaling is None else rope,
        }

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield ParameterPacking("embedding.token.weight", (self.token,))
        heads = tuple(each * shape.head_width for each in (shape.heads, shape.kv_heads, shape.kv_heads))
        for index in range(shape.depth):
            ours, theirs = f"blocks.{index}.", f"model.layers.{index}."
            qkv, gated = [f"{theirs}self_attn.{name}_proj" for name in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
            yield from ParameterPacking.renamed(_BLOCK, ours, theirs, ["weight"])
            yield from ParameterPacking.stacked(f"{ours}attention.qkv", qkv, heads, ["weight"])
            yield from ParameterPacking.stacked(
                f"{ours}mlp.up", [theirs + name for name in gated], (shape.hidden,) * 2, ["weight"]
            )
        yield ParameterPacking("norm.weight", ("model.norm.weight",))


def _rope(config: Config) -> tuple[float, Llama3Scaling | None]:
    """Return rotary base and scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`
    (earlier versions)."""
    rope = {"rope_theta": config.get("rope_theta")} | dict(table(config, "rope_scaling"))
    rope |= dict(table(config, "rope_parameters"))
    base = number(rope, "rope_theta", float, 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise RefusedError(
            "config.json rotates only a part of each head (partial_rotary_factor), which is not supported",
            fix="pass the folder of a Llama model without partial_rotary_factor",
        )
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise RefusedError(
            f"config.json has rotary positions of type {kind!r}; default and llama3 are supported",
            fix="pass the folder of a Llama model with a supported type",
        )
    scaling = Llama3Scaling(
        factor=number(rope, "factor", float),
        low=number(rope, "low_freq_factor", float),
        high=number(rope, "high_freq_factor", float),
        original=number(rope, "original_max_position_embeddings", int),
    )
    return base, scaling
