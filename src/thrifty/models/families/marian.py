"""Marian in transformers: the original Transformer (Vaswani et al. 2017, arXiv 1706.03762), a post-norm
encoder-decoder.

Positions are fixed. Encoder, decoder and head share one embedding, and the logits have a bias.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.attention_layers import causal_attention
from thrifty.models.families.model_family import READ, Config, ModelFamily, ParameterPacking, flag, number
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import BlockStack, EncoderDecoder
from thrifty.models.transformer_blocks import PostNormBlock, SinusoidalPositions, TokenEmbedding

_BLOCK = {
    "attention_norm": "self_attn_layer_norm",
    "attention.out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}
_OVER_MEMORY = {
    "cross_attention_norm": "encoder_attn_layer_norm",
    "cross_attention.q": "encoder_attn.q_proj",
    "cross_attention.out": "encoder_attn.out_proj",
}
_OF_BOTH_SIDES = {
    "decoder_attention_heads": "heads",
    "decoder_ffn_dim": "hidden",
    "decoder_vocab_size": "vocabulary",
}
"""Decoder keys of config.json whose values must equal the encoder's values."""


class Marian(ModelFamily):
    """Marian (Vaswani et al. 2017): the original Transformer, a post-norm encoder-decoder.

    Paper       Vaswani et al. 2017, Attention Is All You Need (arXiv 1706.03762), as in transformers' Marian.
    Promise     Logits for folders with `model_type` "marian" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("marian-nano", "my.txt", loss="sequence_to_sequence", budget="2000 steps")
                thrifty.export(run, "my-marian")
    Start with  `marian-nano` for a first run, `marian-base` for the size of opus-mt.
    Cost        Encoder and decoder each have `depth` blocks and share one embedding with the head.
    Avoid       New models, because pre-norm encoder-decoders such as `t5` train more stably.
    Does not    Learn position embeddings; positions are fixed sinusoids.
    """

    style, model_type, architecture, task = "marian", "marian", "MarianMTModel", "sequence_to_sequence"
    fields: ClassVar = {
        "depth": ("encoder_layers", None),
        "width": ("d_model", None),
        "heads": ("encoder_attention_heads", None),
        "hidden": ("encoder_ffn_dim", None),
        "vocabulary": ("vocab_size", None),
        "length": ("max_position_embeddings", 1024),
        "activation": ("activation_function", "gelu"),
    }
    read = frozenset(
        {"decoder_vocab_size", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim", "scale_embedding"}
    )
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
        decoder = {"core": causal_attention, "kind": PostNormBlock, "cross": True}
        return EncoderDecoder(
            TokenEmbedding(shape.vocabulary, shape.width, positions, scale),
            BlockStack([self.layer_norm_block(shape, kind=PostNormBlock) for _ in range(shape.depth)], nn.Identity()),
            BlockStack([self.layer_norm_block(shape, **decoder) for _ in range(shape.decoder_blocks)], nn.Identity()),
            nn.Linear(shape.width, shape.vocabulary),
        )

    def shape(self, config: Config) -> ModelConfig:
        fields = self.read_fields(config)
        for key, name in _OF_BOTH_SIDES.items():
            same = fields[name]
            if number(config, key, int, same) != same:
                raise RefusedError(
                    f"config.json sets {key} = {config[key]}, but the encoder has {same}, which is not supported",
                    fix="pass the folder of a Marian model whose encoder and decoder have equal values",
                )
        decoder_depth = number(config, "decoder_layers", int)
        return ModelConfig(
            style=self.style,
            kv_heads=fields["heads"],
            tied=True,
            decoder_depth=None if decoder_depth == fields["depth"] else decoder_depth,
            scaled_embedding=flag(config, "scale_embedding", False),
            **fields,
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if not shape.tied:
            raise RefusedError(
                "Marian's head is tied to its embedding, but this head is untied", fix="--set model.tied=true"
            )
        if shape.norm_eps != 1e-5:
            raise RefusedError(
                f"Marian's norms have an epsilon of 1e-5, but this model has {shape.norm_eps}",
                fix="build the model with norm_eps = 1e-5 to export to this format",
            )
        return {
            **self.written_fields(shape),
            **{key: getattr(shape, name) for key, name in _OF_BOTH_SIDES.items()},
            "decoder_layers": shape.decoder_blocks,
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
                ours, theirs = f"{side}.blocks.{index}.", f"model.{side}.layers.{index}."
                qkv = [f"{theirs}self_attn.{part}_proj" for part in "qkv"]
                yield from ParameterPacking.stacked(f"{ours}attention.qkv", qkv, (shape.width,) * 3)
                yield from ParameterPacking.renamed(_BLOCK, ours, theirs)
                if side == "decoder":
                    kv = [f"{theirs}encoder_attn.{part}_proj" for part in "kv"]
                    yield from ParameterPacking.stacked(f"{ours}cross_attention.kv", kv, (shape.width,) * 2)
                    yield from ParameterPacking.renamed(_OVER_MEMORY, ours, theirs)
        yield ParameterPacking("head.bias", ("final_logits_bias",), as_row=True)
