"""ViT (Dosovitskiy et al. 2020, arXiv 2010.11929) and DeiT without its teacher: a pre-norm encoder of image patches.

The pooler and the mask token of published folders are left out, because a classifier does not use them. DeiT's
distilled models (`model_type` "deit") have a second token and a second head, which are not supported.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.models.families.model_family import READ, Config, ModelFamily, ParameterPacking, number, table
from thrifty.models.model_config import ModelConfig
from thrifty.models.vision_transformer import PatchEmbedding, VisionTransformer

EMBEDDING = {
    "class_token": "cls_token",
    "position": "position_embeddings",
    "patch.weight": "patch_embeddings.projection.weight",
    "patch.bias": "patch_embeddings.projection.bias",
}
_BLOCK = {
    "attention_norm": "layernorm_before",
    "attention.out": "attention.output.dense",
    "mlp_norm": "layernorm_after",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}


class PatchEncoder(ModelFamily):
    """Base class of ViT and MAE."""

    bounded = False
    fields: ClassVar = {
        "depth": ("num_hidden_layers", None),
        "width": ("hidden_size", None),
        "heads": ("num_attention_heads", None),
        "hidden": ("intermediate_size", None),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "activation": ("hidden_act", "gelu"),
        "image": ("image_size", 224),
        "patch": ("patch_size", 16),
        "channels": ("num_channels", 3),
    }
    only: ClassVar = {"qkv_bias": (True,), "hidden_act": tuple(READ)}

    def encoder(self, config: Config) -> dict[str, Any]:
        """Return the encoder's `ModelConfig` fields from config.json."""
        values = self.read_fields(config)
        return {"kv_heads": values["heads"], "length": 0, "tied": False} | values

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        fixed = {"qkv_bias": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return self.written_fields(shape) | fixed


class ViT(PatchEncoder):
    """ViT (Dosovitskiy et al. 2020): a pre-norm encoder of image patches with a classification head.

    Paper       Dosovitskiy et al. 2020, An Image is Worth 16x16 Words (arXiv 2010.11929); DeiT sizes are Touvron et al.
                2020 (arXiv 2012.12877).
    Promise     Logits for folders with `model_type` "vit" equal the logits of transformers up to rounding.
    Use         run = thrifty.train("vit-nano", "digits", loss="classification", budget="2000 steps")
                thrifty.export(run, "my-vit")
    Start with  `vit-nano` for images of 32 pixels, `deit-tiny` for 224 pixels.
    Cost        Attention is quadratic in the number of patches.
    Avoid       Small datasets without augmentation.
    Does not    Include DeiT's distillation token, or the pooler of published folders.
    """

    style, model_type, architecture, task = "vit", "vit", "ViTForImageClassification", "classification"
    read = frozenset({"num_labels"})
    ignored = frozenset({
        "attention_probs_dropout_prob", "encoder_stride", "hidden_dropout_prob", "pooler_act", "pooler_output_size",
    })  # fmt: skip
    body, token = "vit.", ""
    head = "classifier.weight"
    left_out = r"^(vit\.)?pooler\.|embeddings\.mask_token$"

    def assemble(self, shape: ModelConfig) -> VisionTransformer:
        return VisionTransformer(
            PatchEmbedding(shape.image, shape.patch, shape.channels, shape.width, shape.pool),  # type: ignore[arg-type]
            [self.layer_norm_block(shape) for _ in range(shape.depth)],
            nn.LayerNorm(shape.width, eps=shape.norm_eps),
            nn.Linear(shape.width, shape.vocabulary),
            shape.pool,  # type: ignore[arg-type]
        )

    def shape(self, config: Config) -> ModelConfig:
        labels = table(config, "id2label")
        # transformers leaves out the labels if there are two without names
        count = len(labels) if labels else number(config, "num_labels", int, 2)
        return ModelConfig(style=self.style, vocabulary=count, **self.encoder(config))

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if shape.pool != "class":
            raise RefusedError(
                "a ViT of transformers pools by its class token, but this model pools by the mean of its patches",
                fix='train with model.pool = "class" to export to this format',
            )
        return super().config(shape) | {"id2label": {str(label): f"LABEL_{label}" for label in range(shape.vocabulary)}}

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        for ours, theirs in EMBEDDING.items():
            if ours != "class_token" or shape.pool != "mean":
                yield ParameterPacking(f"embedding.{ours}", (f"vit.embeddings.{theirs}",))
        yield from packed_blocks("blocks", "vit.encoder.layer", shape.depth, shape.width)
        yield from ParameterPacking.renamed({"norm": "vit.layernorm"})
        yield ParameterPacking("head.bias", ("classifier.bias",))


def packed_blocks(ours: str, theirs: str, depth: int, width: int) -> Iterator[ParameterPacking]:
    """Yield the conversion rules of `depth` blocks; `ours` and `theirs` are name prefixes."""
    for index in range(depth):
        qkv = [f"{theirs}.{index}.attention.attention.{part}" for part in ("query", "key", "value")]
        yield from ParameterPacking.stacked(f"{ours}.{index}.attention.qkv", qkv, (width,) * 3)
        yield from ParameterPacking.renamed(_BLOCK, f"{ours}.{index}.", f"{theirs}.{index}.")
