"""GPT-2 (pre-norm) and GPT-1 (post-norm): decoders with learned positions."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.attention_layers import causal_attention
from thrifty.models.families.model_family import Config, ModelFamily, ParameterPacking, flag, number
from thrifty.models.init_laws import normal_init
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import Transformer
from thrifty.models.transformer_blocks import PostNormBlock, TokenEmbedding

_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def _embedding(shape: ModelConfig) -> TokenEmbedding:
    return TokenEmbedding(shape.vocabulary, shape.width, position=nn.Embedding(shape.length, shape.width))


class GPT1(ModelFamily):
    """GPT (Radford et al. 2018): a post-norm decoder with learned positions.

    Paper       Radford et al. 2018, Improving Language Understanding by Generative Pre-Training.
    Promise     Logits for folders with `model_type` "openai-gpt" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("gpt1-nano", "my.txt", budget="2000 steps")
                thrifty.export(run, "my-gpt1")
    Start with  `gpt1-nano` for a first run, `gpt1-small` for the published size.
    Cost        Attention is quadratic in the length. Token embedding and head are one matrix of vocabulary times width.
    Avoid       New models, because post-norm decoders train less stably than `gpt` or `llama`.
    Does not    Accept texts longer than its position table.
    """

    style, model_type, architecture, task = "gpt1", "openai-gpt", "OpenAIGPTLMHeadModel", "next_token"
    free_hidden = False
    fields: ClassVar = {
        "depth": ("n_layer", None),
        "width": ("n_embd", None),
        "heads": ("n_head", None),
        "vocabulary": ("vocab_size", None),
        "length": ("n_positions", None),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    }
    read = frozenset({"tie_word_embeddings"})
    only: ClassVar = {"afn": ("gelu",)}  # OpenAI's "gelu" is the tanh approximation
    ignored = frozenset({"n_special", "predict_special_tokens"})
    body, token = "transformer.", "transformer.tokens_embed.weight"
    left_out = r"\.attn\.bias$|\.position_ids$"

    def assemble(self, shape: ModelConfig) -> Transformer:
        return Transformer(
            _embedding(shape),
            [self.layer_norm_block(shape, causal_attention, PostNormBlock) for _ in range(shape.depth)],
            nn.Identity(),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
            law=normal_init,
        )

    def shape(self, config: Config) -> ModelConfig:
        fields = self.read_fields(config)
        hidden = number(config, "n_inner", int, 4 * fields["width"])
        tied = flag(config, "tie_word_embeddings", True)
        return ModelConfig(style=self.style, kv_heads=fields["heads"], hidden=hidden, tied=tied, **fields)

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if shape.hidden != 4 * shape.width:
            raise RefusedError(
                f"GPT-1 has an inner width of 4 times the width, but this model has {shape.hidden} for {shape.width}",
                fix="train without model.hidden to export to this format",
            )
        return self.written_fields(shape) | {"afn": "gelu"} | _WITHOUT_DROPOUT

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        embeddings = {"embedding.token": "tokens_embed", "embedding.position": "positions_embed"}
        yield from ParameterPacking.renamed(embeddings, theirs=self.body, kinds=["weight"])
        yield from _blocks_table(shape)


class GPT2(GPT1):
    """GPT-2 (Radford et al. 2019): a pre-norm decoder with learned positions.

    Paper       Radford et al. 2019, Language Models are Unsupervised Multitask Learners.
    Promise     Logits for folders with `model_type` "gpt2" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("gpt-nano", "my.txt", budget="2000 steps")
                thrifty.export(run, "my-gpt2")
    Start with  `gpt-nano` for a first run, `gpt-small` for the published size.
    Cost        Attention is quadratic in the length. Token embedding and head are one matrix of vocabulary times width.
    Avoid       Longer texts than in training, because learned positions do not extrapolate.
    Does not    Accept texts longer than its position table.
    """

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
            [self.layer_norm_block(shape, causal_attention) for _ in range(shape.depth)],
            nn.LayerNorm(shape.width, eps=shape.norm_eps),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        own = {"n_inner": shape.hidden, "activation_function": "gelu_new"}
        return self.written_fields(shape) | own | _WITHOUT_DROPOUT

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        embeddings = {"embedding.token": "wte", "embedding.position": "wpe"}
        yield from ParameterPacking.renamed(embeddings, theirs=self.body, kinds=["weight"])
        yield from _blocks_table(shape)
        yield from ParameterPacking.renamed({"norm": "transformer.ln_f"})


def _blocks_table(shape: ModelConfig) -> Iterator[ParameterPacking]:
    for index in range(shape.depth):
        for ours, theirs in _BLOCK.items():
            prefix = f"transformer.h.{index}.{theirs}"
            yield ParameterPacking(
                f"blocks.{index}.{ours}.weight", (f"{prefix}.weight",), transposed="norm" not in ours
            )
            yield ParameterPacking(f"blocks.{index}.{ours}.bias", (f"{prefix}.bias",))
