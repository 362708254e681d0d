"""BERT (Devlin et al. 2018, arXiv 1810.04805): a post-norm encoder for masked tokens.

The pooler and the next-sentence head of published folders are left out, because they do not affect masked-token
predictions.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.families.model_family import ACTIVATION, READ, Config, ModelFamily, ParameterPacking
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import Encoder
from thrifty.models.transformer_blocks import MaskedTokenTransform, NormedEmbedding, PostNormBlock

_EMBEDDING = {
    "token": "word_embeddings",
    "position": "position_embeddings",
    "token_type": "token_type_embeddings",
    "norm": "LayerNorm",
}
_BLOCK = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


class Bert(ModelFamily):
    """BERT (Devlin et al. 2018): a post-norm encoder that predicts masked tokens.

    Paper       Devlin et al. 2018, BERT: Pre-training of Deep Bidirectional Transformers (arXiv 1810.04805).
    Promise     Logits for folders with `model_type` "bert" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("bert-nano", "my.txt", loss="masked_token", budget="2000 steps")
                thrifty.export(run, "my-bert")
    Start with  `bert-nano` for a first run, `bert-small` for the size of BERT base.
    Cost        The loss covers only masked tokens, 15 % by default.
    Avoid       Text generation, because every token attends to later tokens.
    Does not    Include the pooler or the next-sentence head of published folders.
    """

    style, model_type, architecture, task = "bert", "bert", "BertForMaskedLM", "masked_token"
    fields: ClassVar = {
        "depth": ("num_hidden_layers", None),
        "width": ("hidden_size", None),
        "heads": ("num_attention_heads", None),
        "hidden": ("intermediate_size", None),
        "vocabulary": ("vocab_size", None),
        "length": ("max_position_embeddings", 512),
        "token_types": ("type_vocab_size", 2),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "activation": ("hidden_act", "gelu"),
    }
    only: ClassVar = {
        "is_decoder": (False,),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
        "hidden_act": tuple(READ),
    }
    ignored = frozenset({
        "attention_probs_dropout_prob", "classifier_dropout", "directionality", "hidden_dropout_prob",
        "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    })  # fmt: skip
    body, token = "bert.", "bert.embeddings.word_embeddings.weight"
    head = "cls.predictions.decoder.weight"
    aliases: ClassVar = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    left_out = r"^(bert\.)?pooler\.|^cls\.seq_relationship\.|\.position_ids$"

    def assemble(self, shape: ModelConfig) -> Encoder:
        first, last = (nn.LayerNorm(shape.width, eps=shape.norm_eps) for _ in range(2))
        return Encoder(
            NormedEmbedding(shape.vocabulary, shape.width, shape.length, shape.token_types, first),
            [self.layer_norm_block(shape, kind=PostNormBlock) for _ in range(shape.depth)],
            MaskedTokenTransform(shape.width, ACTIVATION[shape.activation](), last),
            nn.Linear(shape.width, shape.vocabulary),
        )

    def shape(self, config: Config) -> ModelConfig:
        fields = self.read_fields(config)
        return ModelConfig(style=self.style, kv_heads=fields["heads"], tied=True, **fields)

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if not shape.tied:
            raise RefusedError(
                "BERT's head is tied to its token embedding, but this head is untied", fix="--set model.tied=true"
            )
        return self.written_fields(shape) | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield from ParameterPacking.renamed(_EMBEDDING, "embedding.", "bert.embeddings.", ["weight"])
        for index in range(shape.depth):
            ours, theirs = f"blocks.{index}.", f"bert.encoder.layer.{index}."
            qkv = [f"{theirs}attention.self.{part}" for part in ("query", "key", "value")]
            yield from ParameterPacking.stacked(f"{ours}attention.qkv", qkv, (shape.width,) * 3)
            yield from ParameterPacking.renamed(_BLOCK, ours, theirs)
        yield from ParameterPacking.renamed(
            {"dense": "dense", "norm": "LayerNorm"}, "transform.", "cls.predictions.transform."
        )
        yield ParameterPacking("embedding.norm.bias", ("bert.embeddings.LayerNorm.bias",))
        yield ParameterPacking("head.bias", ("cls.predictions.bias",))
