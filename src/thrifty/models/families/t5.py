"""T5 (Raffel et al. 2020, arXiv 1910.10683): a pre-norm encoder-decoder with learned relative positions.

Version 1.0 ties the head to the embedding and scales the head's input by 1 / sqrt(d). Version 1.1 (Shazeer 2020, arXiv
2002.05202) has gated networks and an untied head without the scale. In Thrifty a tied head is scaled, and an untied
head is not.
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
    """T5 (Raffel et al. 2020): a pre-norm encoder-decoder with learned relative positions.

    Paper       Raffel et al. 2020, Exploring the Limits of Transfer Learning (arXiv 1910.10683); version 1.1 is Shazeer
                2020 (arXiv 2002.05202).
    Promise     Logits for folders with `model_type` "t5" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("t5-nano", "my.txt", loss="sequence_to_sequence", budget="2000 steps")
                thrifty.export(run, "my-t5")
    Start with  `t5-nano` for a first run, `t5-small` or `t5-v1.1-small` for published sizes.
    Cost        Encoder and decoder each have `depth` blocks.
    Avoid       Next-token prediction, because a decoder alone needs half the blocks.
    Does not    Limit the length; at long distances, relative positions share buckets.
    """

    style, model_type, architecture, task = "t5", "t5", "T5ForConditionalGeneration", "sequence_to_sequence"
    bounded = False
    fields: ClassVar = {
        "depth": ("num_layers", None),
        "width": ("d_model", None),
        "hidden": ("d_ff", None),
        "heads": ("num_heads", None),
        "vocabulary": ("vocab_size", None),
        "length": ("n_positions", 512),
        "buckets": ("relative_attention_num_buckets", 32),
        "distance": ("relative_attention_max_distance", 128),
        "norm_eps": ("layer_norm_epsilon", 1e-6),
    }
    read = frozenset({
        "d_kv", "num_decoder_layers", "feed_forward_proj", "dense_act_fn", "is_gated_act", "tie_word_embeddings",
        "scale_decoder_outputs",
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
        fields = self.read_fields(config)
        depth, heads, head_width = fields["depth"], fields["heads"], number(config, "d_kv", int)
        decoder_depth = number(config, "num_decoder_layers", int, depth)
        return ModelConfig(
            style=self.style,
            kv_heads=heads,
            tied=_tied(config),
            activation=_activation(config),
            decoder_depth=None if decoder_depth == depth else decoder_depth,
            fixed_head_width=None if head_width * heads == fields["width"] else head_width,
            **fields,
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        gated = shape.activation.startswith(_GATED)
        activation = SPELLED[shape.activation.removeprefix(_GATED)]
        return self.written_fields(shape) | {
            "num_decoder_layers": shape.decoder_blocks,
            "d_kv": shape.head_width,
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
    heads, decoder, weight = shape.heads * shape.head_width, ours.startswith("decoder"), ["weight"]
    inside, across, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention", f"{theirs}.{2 if decoder else 1}"
    names = {
        "attention_norm": f"{theirs}.0.layer_norm",
        "attention.out": f"{inside}.o",
        "mlp_norm": f"{mlp}.layer_norm",
        "mlp.down": f"{mlp}.DenseReluDense.wo",
    }
    yield from ParameterPacking.stacked(
        f"{ours}.attention.qkv", [f"{inside}.{part}" for part in "qkv"], (heads,) * 3, weight
    )
    if shape.activation.startswith(_GATED):
        gated = [f"{mlp}.DenseReluDense.wi_{part}" for part in (0, 1)]
        yield from ParameterPacking.stacked(f"{ours}.mlp.up", gated, (shape.hidden,) * 2, weight)
    else:
        names["mlp.up"] = f"{mlp}.DenseReluDense.wi"
    if decoder:
        names |= {
            "cross_attention_norm": f"{theirs}.1.layer_norm",
            "cross_attention.q": f"{across}.q",
            "cross_attention.out": f"{across}.o",
        }
        yield from ParameterPacking.stacked(
            f"{ours}.cross_attention.kv", [f"{across}.{part}" for part in "kv"], (heads,) * 2, weight
        )
    yield from ParameterPacking.renamed(names, f"{ours}.", kinds=weight)


def _tied(config: Config) -> bool:
    """Return True if the head is tied, and therefore scaled. transformers 5 writes `tie_word_embeddings` true for an
    untied head too; `scale_decoder_outputs` distinguishes the two cases."""
    tied = flag(config, "tie_word_embeddings", True)
    scaled = flag(config, "scale_decoder_outputs", tied)
    if scaled and not tied:
        raise RefusedError(
            "config.json sets scale_decoder_outputs = True for an untied head, which is not supported",
            fix="pass a T5 folder with a tied head; or with scale_decoder_outputs = false in config.json",
        )
    return scaled


def _activation(config: Config) -> str:
    """Return the activation from `feed_forward_proj`; `dense_act_fn` and `is_gated_act` must not contradict it."""
    word = config.get("feed_forward_proj", "relu")
    gated, name = str(word).startswith(_GATED), str(word).removeprefix(_GATED)
    name = "gelu_new" if word == "gated-gelu" else name  # T5 1.1 means the tanh approximation
    stated = config.get("dense_act_fn", name)
    if name not in READ or READ.get(stated) != READ[name] or config.get("is_gated_act", gated) != gated:
        raise RefusedError(
            f"config.json sets feed_forward_proj = {word!r} with dense_act_fn = {stated!r}, which is not supported",
            fix=f"pass a T5 folder whose settings agree on one activation: {', '.join(READ)}",
        )
    return (_GATED if gated else "") + READ[name]
