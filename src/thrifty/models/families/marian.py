"""Marian as transformers has it: the original Transformer (Vaswani et al. 2017, arXiv 1706.03762), a post-norm
encoder–decoder with fixed positions, one embedding for both sides and the head, and a bias on the logits."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.attention_layers import Attention, CrossAttention, causal_attention, full_attention
from thrifty.models.families.model_family import ACTIVATION, READ, Config, ModelFamily, ParameterPacking, flag, number
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import BlockStack, EncoderDecoder
from thrifty.models.transformer_blocks import FeedForward, PostNormBlock, SinusoidalPositions, TokenEmbedding

_ATTENTION = {"attention": "self_attn", "cross_attention": "encoder_attn"}
_BLOCK = {
    "attention_norm": "self_attn_layer_norm",
    "attention.out": "self_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "cross_attention.q": "encoder_attn.q_proj",
    "cross_attention.out": "encoder_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}


def _block(shape: ModelConfig, decoder: bool) -> PostNormBlock:
    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(shape.width, eps=shape.norm_eps)

    core = causal_attention if decoder else full_attention
    over_memory = (norm(), CrossAttention(shape.width, shape.heads, bias=True)) if decoder else ()
    return PostNormBlock(
        norm(),
        Attention(shape.width, shape.heads, bias=True, core=core),
        norm(),
        FeedForward(shape.width, shape.hidden, ACTIVATION[shape.activation]()),
        *over_memory,
    )


class Marian(ModelFamily):
    style, model_type, architecture, task = "marian", "marian", "MarianMTModel", "sequence_to_sequence"
    fields: ClassVar = {"length": ("max_position_embeddings", 1024), "activation": ("activation_function", "gelu")}
    read = frozenset({
        "d_model", "vocab_size", "decoder_vocab_size", "encoder_layers", "decoder_layers", "encoder_attention_heads",
        "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "scale_embedding",
    })  # fmt: skip
    only: ClassVar = {
        "is_decoder": (False,),
        "is_encoder_decoder": (True,),
        "share_encoder_decoder_embeddings": (True,),
        "static_position_embeddings": (True,),
        "tie_word_embeddings": (True,),
        "activation_function": tuple(READ),
    }
    ignored = frozenset({
        "activation_dropout", "classif_dropout", "classifier_dropout", "decoder_layerdrop", "dropout",
        "encoder_layerdrop", "extra_pos_embeddings", "init_std", "num_hidden_layers",
    })  # fmt: skip
    body, token = "model.", "model.shared.weight"
    aliases: ClassVar = {"model.encoder.embed_tokens.weight": token, "model.decoder.embed_tokens.weight": token}
    left_out = r"\.embed_positions\.weight$"

    def assemble(self, shape: ModelConfig) -> EncoderDecoder:
        positions = SinusoidalPositions(shape.length, shape.width)
        scale = shape.width**0.5 if shape.scaled_embedding else 1.0
        return EncoderDecoder(
            TokenEmbedding(shape.vocabulary, shape.width, positions, scale),
            BlockStack([_block(shape, decoder=False) for _ in range(shape.depth)], nn.Identity()),
            BlockStack([_block(shape, decoder=True) for _ in range(shape.decoder_blocks)], nn.Identity()),
            nn.Linear(shape.width, shape.vocabulary),
        )

    def shape(self, config: Config) -> ModelConfig:
        depth, heads = number(config, "encoder_layers", int), number(config, "encoder_attention_heads", int)
        hidden, vocabulary = number(config, "encoder_ffn_dim", int), number(config, "vocab_size", int)
        for key, same in (
            ("decoder_attention_heads", heads),
            ("decoder_ffn_dim", hidden),
            ("decoder_vocab_size", vocabulary),
        ):
            if number(config, key, int, same) != same:
                raise RefusedError(f"config.json sets {key} = {config[key]}, unlike the encoder's {same}; not imported")
        decoder_depth = number(config, "decoder_layers", int)
        return ModelConfig(
            style=self.style,
            depth=depth,
            width=number(config, "d_model", int),
            heads=heads,
            kv_heads=heads,
            hidden=hidden,
            vocabulary=vocabulary,
            tied=True,
            decoder_depth=None if decoder_depth == depth else decoder_depth,
            scaled_embedding=flag(config, "scale_embedding", False),
            **self.read_fields(config),
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if not shape.tied:
            raise RefusedError("Marian's head is tied to its embedding, this one is free", fix="train with model.tied")
        if shape.norm_eps != 1e-5:
            raise RefusedError(f"Marian's norms have an epsilon of 1e-5, these {shape.norm_eps}")
        sides = {
            f"{side}_{key}": value
            for side, depth in (("encoder", shape.depth), ("decoder", shape.decoder_blocks))
            for key, value in (("layers", depth), ("attention_heads", shape.heads), ("ffn_dim", shape.hidden))
        }
        return {
            **sides,
            **self.written_fields(shape),
            "d_model": shape.width,
            "decoder_vocab_size": shape.vocabulary,
            "scale_embedding": shape.scaled_embedding,
            "share_encoder_decoder_embeddings": True,
            "is_encoder_decoder": True,
            "forced_eos_token_id": None,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        }

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield ParameterPacking("embedding.token.weight", (self.token,))
        for side, depth in (("encoder", shape.depth), ("decoder", shape.decoder_blocks)):
            for index in range(depth):
                for kind in ("weight", "bias"):
                    prefixes = (f"{side}.blocks.{index}", f"model.{side}.layers.{index}")
                    yield from _block_table(shape, *prefixes, kind, cross=side == "decoder")
        yield ParameterPacking("head.bias", ("final_logits_bias",), as_row=True)


def _block_table(shape: ModelConfig, ours: str, theirs: str, kind: str, cross: bool) -> Iterator[ParameterPacking]:
    for fused, parts in (("attention.qkv", "qkv"), ("cross_attention.kv", "kv")):
        attention = _ATTENTION[fused.partition(".")[0]]
        if cross or attention == "self_attn":
            names = tuple(f"{theirs}.{attention}.{part}_proj.{kind}" for part in parts)
            yield ParameterPacking(f"{ours}.{fused}.{kind}", names, rows=(shape.width,) * len(parts))
    for mine, yours in _BLOCK.items():
        if cross or not mine.startswith("cross"):
            yield ParameterPacking(f"{ours}.{mine}.{kind}", (f"{theirs}.{yours}.{kind}",))
