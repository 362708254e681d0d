"""T5 (Raffel et al. 2020, arXiv 1910.10683): a pre-norm encoder–decoder whose positions are learned scores of distance.

Version 1.0 ties the head to the embedding and scales what it is given by 1 / sqrt(d); version 1.1 (Shazeer 2020, arXiv
2002.05202) has gated networks and a free head without the scale. So here a tied head is scaled and a free one is not.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.attention_layers import Attention, CrossAttention, RelativePositions, full_attention
from thrifty.models.families.model_family import (
    ACTIVATION,
    READ,
    SPELLED,
    Config,
    ModelFamily,
    ParameterPacking,
    flag,
    number,
)
from thrifty.models.init_laws import t5_normal
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import BlockStack, EncoderDecoder
from thrifty.models.transformer_blocks import FeedForward, GatedFeedForward, TokenEmbedding, TransformerBlock

_GATED = "gated-"
_unscaled = partial(full_attention, scale=1.0)


def _block(shape: ModelConfig, cross: bool) -> TransformerBlock:
    def norm() -> nn.RMSNorm:
        return nn.RMSNorm(shape.width, eps=shape.norm_eps)

    sizes = {"core": _unscaled, "head_width": shape.head_width}
    over_memory = (norm(), CrossAttention(shape.width, shape.heads, **sizes)) if cross else ()
    activation = ACTIVATION[shape.activation.removeprefix(_GATED)]()
    if shape.activation.startswith(_GATED):
        mlp: nn.Module = GatedFeedForward(shape.width, shape.hidden, activation)
    else:
        mlp = FeedForward(shape.width, shape.hidden, activation, bias=False)
    return TransformerBlock(norm(), Attention(shape.width, shape.heads, **sizes), norm(), mlp, *over_memory)


def _stack(shape: ModelConfig, depth: int, decoder: bool) -> BlockStack:
    return BlockStack(
        [_block(shape, cross=decoder) for _ in range(depth)],
        nn.RMSNorm(shape.width, eps=shape.norm_eps),
        RelativePositions(shape.heads, shape.buckets, shape.distance, causal=decoder),
    )


class T5(ModelFamily):
    style, model_type, architecture, task = "t5", "t5", "T5ForConditionalGeneration", "sequence_to_sequence"
    bounded = False
    read = frozenset({
        "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "vocab_size", "n_positions",
        "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
        "feed_forward_proj", "dense_act_fn", "is_gated_act", "tie_word_embeddings", "scale_decoder_outputs",
    })  # fmt: skip
    only: ClassVar = {"is_decoder": (False,), "is_encoder_decoder": (True,)}
    ignored = frozenset({"classifier_dropout", "dropout_rate", "initializer_factor"})
    token = "shared.weight"  # noqa: S105 (no password)
    aliases: ClassVar = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
    left_out = r"\.EncDecAttention\.relative_attention_bias\.weight$"

    def assemble(self, shape: ModelConfig) -> EncoderDecoder:
        return EncoderDecoder(
            TokenEmbedding(shape.vocabulary, shape.width),
            _stack(shape, shape.depth, decoder=False),
            _stack(shape, shape.decoder_blocks, decoder=True),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
            scale=shape.width**-0.5 if shape.tied else 1.0,
            law=partial(t5_normal, width=shape.width, head_width=shape.head_width),
        )

    def shape(self, config: Config) -> ModelConfig:
        depth, width = number(config, "num_layers", int), number(config, "d_model", int)
        heads, head_width = number(config, "num_heads", int), number(config, "d_kv", int)
        decoder_depth = number(config, "num_decoder_layers", int, depth)
        return ModelConfig(
            style=self.style,
            depth=depth,
            width=width,
            heads=heads,
            kv_heads=heads,
            hidden=number(config, "d_ff", int),
            vocabulary=number(config, "vocab_size", int),
            length=number(config, "n_positions", int, 512),
            tied=_tied(config),
            norm_eps=number(config, "layer_norm_epsilon", float, 1e-6),
            activation=_activation(config),
            decoder_depth=None if decoder_depth == depth else decoder_depth,
            fixed_head_width=None if head_width * heads == width else head_width,
            buckets=number(config, "relative_attention_num_buckets", int, 32),
            distance=number(config, "relative_attention_max_distance", int, 128),
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        gated = shape.activation.startswith(_GATED)
        activation = SPELLED[shape.activation.removeprefix(_GATED)]
        return {
            "num_layers": shape.depth,
            "num_decoder_layers": shape.decoder_blocks,
            "d_model": shape.width,
            "d_kv": shape.head_width,
            "d_ff": shape.hidden,
            "num_heads": shape.heads,
            "n_positions": shape.length,
            "relative_attention_num_buckets": shape.buckets,
            "relative_attention_max_distance": shape.distance,
            "layer_norm_epsilon": shape.norm_eps,
            "feed_forward_proj": "gated-gelu" if gated and activation == "gelu_new" else _GATED * gated + activation,
            "dense_act_fn": activation,
            "is_gated_act": gated,
            "scale_decoder_outputs": shape.tied,
            "is_encoder_decoder": True,
            "dropout_rate": 0.0,
        }

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield ParameterPacking("embedding.token.weight", (self.token,))
        for side, depth in (("encoder", shape.depth), ("decoder", shape.decoder_blocks)):
            for index in range(depth):
                yield from _block_table(shape, f"{side}.blocks.{index}", f"{side}.block.{index}.layer")
            scores = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield ParameterPacking(f"{side}.relative.scores.weight", (scores,))
            yield ParameterPacking(f"{side}.norm.weight", (f"{side}.final_layer_norm.weight",))


def _block_table(shape: ModelConfig, ours: str, theirs: str) -> Iterator[ParameterPacking]:
    heads, decoder = shape.heads * shape.head_width, ours.startswith("decoder")
    mlp = f"{theirs}.{2 if decoder else 1}"
    up, rows = (f"{mlp}.DenseReluDense.wi.weight",), ()
    if shape.activation.startswith(_GATED):
        up = (f"{mlp}.DenseReluDense.wi_0.weight", f"{mlp}.DenseReluDense.wi_1.weight")
        rows = (shape.hidden, shape.hidden)
    inside, across = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention"
    yield ParameterPacking(f"{ours}.attention_norm.weight", (f"{theirs}.0.layer_norm.weight",))
    yield ParameterPacking(
        f"{ours}.attention.qkv.weight", tuple(f"{inside}.{part}.weight" for part in "qkv"), rows=(heads,) * 3
    )
    yield ParameterPacking(f"{ours}.attention.out.weight", (f"{inside}.o.weight",))
    if decoder:
        yield ParameterPacking(f"{ours}.cross_attention_norm.weight", (f"{theirs}.1.layer_norm.weight",))
        yield ParameterPacking(f"{ours}.cross_attention.q.weight", (f"{across}.q.weight",))
        yield ParameterPacking(
            f"{ours}.cross_attention.kv.weight", tuple(f"{across}.{part}.weight" for part in "kv"), rows=(heads,) * 2
        )
        yield ParameterPacking(f"{ours}.cross_attention.out.weight", (f"{across}.o.weight",))
    yield ParameterPacking(f"{ours}.mlp_norm.weight", (f"{mlp}.layer_norm.weight",))
    yield ParameterPacking(f"{ours}.mlp.up.weight", up, rows=rows)
    yield ParameterPacking(f"{ours}.mlp.down.weight", (f"{mlp}.DenseReluDense.wo.weight",))


def _tied(config: Config) -> bool:
    """Whether the head is tied, and so scaled. transformers 5 writes `tie_word_embeddings` true for a free head, too,
    and says by `scale_decoder_outputs` which of the two is meant."""
    tied = flag(config, "tie_word_embeddings", True)
    scaled = flag(config, "scale_decoder_outputs", tied)
    if scaled and not tied:
        raise RefusedError("config.json sets scale_decoder_outputs = True for a free head, which is not imported")
    return scaled


def _activation(config: Config) -> str:
    """`feed_forward_proj` decides; what follows from it may stand beside it, but must not contradict."""
    word = config.get("feed_forward_proj", "relu")
    gated, name = str(word).startswith(_GATED), str(word).removeprefix(_GATED)
    name = "gelu_new" if word == "gated-gelu" else name  # T5 1.1 means the approximation by tanh
    said = config.get("dense_act_fn", name)
    if name not in READ or READ.get(said) != READ[name] or config.get("is_gated_act", gated) != gated:
        raise RefusedError(f"config.json sets feed_forward_proj = {word!r} with dense_act_fn = {said!r}, not imported")
    return (_GATED if gated else "") + READ[name]
