"""GPT-2 (pre-norm) and GPT-1 (post-norm): decoders with learned positions."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.attention_layers import Attention
from thrifty.models.families.model_family import ACTIVATION, Config, ModelFamily, ParameterPacking, flag, number
from thrifty.models.init_laws import normal_init
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import Transformer
from thrifty.models.transformer_blocks import FeedForward, PostNormBlock, TokenEmbedding, TransformerBlock

_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _embedding(shape: ModelConfig) -> TokenEmbedding:
    return TokenEmbedding(shape.vocabulary, shape.width, position=nn.Embedding(shape.length, shape.width))


def _block(kind: type[TransformerBlock], shape: ModelConfig) -> TransformerBlock:
    return kind(
        nn.LayerNorm(shape.width, eps=shape.norm_eps),
        Attention(shape.width, shape.heads, bias=True),
        nn.LayerNorm(shape.width, eps=shape.norm_eps),
        FeedForward(shape.width, shape.hidden, ACTIVATION[shape.activation]()),
    )


class GPT1(ModelFamily):
    """Radford et al. 2018, Improving Language Understanding by Generative Pre-Training: a post-norm decoder."""

    style, model_type, architecture, task = "gpt1", "openai-gpt", "OpenAIGPTLMHeadModel", "next_token"
    free_hidden = False
    read = frozenset(
        {"n_embd", "n_head", "n_layer", "vocab_size", "n_positions", "tie_word_embeddings", "layer_norm_epsilon"}
    )
    only: ClassVar = {"afn": ("gelu",)}  # the approximation by tanh is meant
    ignored = frozenset({"n_special", "predict_special_tokens"})
    body, token = "transformer.", "transformer.tokens_embed.weight"
    left_out = r"\.attn\.bias$|\.position_ids$"

    def assemble(self, shape: ModelConfig) -> Transformer:
        return Transformer(
            _embedding(shape),
            [_block(PostNormBlock, shape) for _ in range(shape.depth)],
            nn.Identity(),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
            law=normal_init,
        )

    def shape(self, config: Config) -> ModelConfig:
        width, heads = number(config, "n_embd", int), number(config, "n_head", int)
        return ModelConfig(
            style=self.style,
            depth=number(config, "n_layer", int),
            width=width,
            heads=heads,
            kv_heads=heads,
            hidden=number(config, "n_inner", int, 4 * width),
            vocabulary=number(config, "vocab_size", int),
            length=number(config, "n_positions", int),
            tied=flag(config, "tie_word_embeddings", True),
            norm_eps=number(config, "layer_norm_epsilon", float, 1e-5),
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if shape.hidden != 4 * shape.width:
            raise RefusedError(
                f"GPT-1 has an inner width of 4 times the width, this model {shape.hidden} for {shape.width}",
                fix="train without model.hidden to export to this format",
            )
        return _config(shape, {}, {"afn": "gelu"})

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield ParameterPacking("embedding.token.weight", (self.token,))
        yield ParameterPacking("embedding.position.weight", ("transformer.positions_embed.weight",))
        yield from _blocks_table(shape)


class GPT2(GPT1):
    """Radford et al. 2019, Language Models are Unsupervised Multitask Learners: pre-norm, and a norm at the end."""

    style, model_type, architecture = "gpt", "gpt2", "GPT2LMHeadModel"
    free_hidden = True
    read = GPT1.read | {"n_inner"}
    only: ClassVar = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)}
    ignored = frozenset()
    token = "transformer.wte.weight"  # noqa: S105 (no password)
    left_out = r"\.attn\.(bias|masked_bias)$"

    def assemble(self, shape: ModelConfig) -> Transformer:
        return Transformer(
            _embedding(shape),
            [_block(TransformerBlock, shape) for _ in range(shape.depth)],
            nn.LayerNorm(shape.width, eps=shape.norm_eps),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        return _config(shape, {"n_inner": shape.hidden}, {"activation_function": "gelu_new"})

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield ParameterPacking("embedding.token.weight", (self.token,))
        yield ParameterPacking("embedding.position.weight", ("transformer.wpe.weight",))
        yield from _blocks_table(shape)
        yield ParameterPacking("norm.weight", ("transformer.ln_f.weight",))
        yield ParameterPacking("norm.bias", ("transformer.ln_f.bias",))


def _config(shape: ModelConfig, inner: Mapping[str, int], activation: Mapping[str, str]) -> dict[str, Any]:
    sizes = {"n_layer": shape.depth, "n_embd": shape.width, "n_head": shape.heads, **inner, "n_positions": shape.length}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return sizes | {"layer_norm_epsilon": shape.norm_eps} | activation | dropout


def _blocks_table(shape: ModelConfig) -> Iterator[ParameterPacking]:
    for index in range(shape.depth):
        for ours, theirs in _BLOCK.items():
            prefix = f"transformer.h.{index}.{theirs}"
            yield ParameterPacking(
                f"blocks.{index}.{ours}.weight", (f"{prefix}.weight",), transposed="norm" not in ours
            )
            yield ParameterPacking(f"blocks.{index}.{ours}.bias", (f"{prefix}.bias",))
