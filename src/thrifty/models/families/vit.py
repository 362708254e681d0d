"""ViT (Dosovitskiy et al. 2020, arXiv 2010.11929) and DeiT without its teacher: a pre-norm encoder of image patches.

The pooler and the mask token of published folders are left out: a classifier has no use for them. DeiT's distilled
models (`model_type` "deit") have a second token and a second head, which ours has not.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import Refused, UsageError
from thrifty.models.attention import Attention, full_attention
from thrifty.models.blocks import Block, FeedForward
from thrifty.models.families.family import ACTIVATION, READ, SPELLED, Config, Family, Packing, number
from thrifty.models.shape import Shape
from thrifty.models.vision import PatchEmbedding, VisionTransformer

_EMBEDDING = {
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


class ViT(Family):
    style, model_type, architecture, task = "vit", "vit", "ViTForImageClassification", "classify"
    bounded = False
    read = frozenset({
        "num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "layer_norm_eps", "hidden_act",
        "image_size", "patch_size", "num_channels", "id2label", "num_labels",
    })  # fmt: skip
    only: ClassVar = {"qkv_bias": (True,), "hidden_act": tuple(READ)}
    ignored = frozenset({
        "attention_probs_dropout_prob", "encoder_stride", "hidden_dropout_prob", "pooler_act", "pooler_output_size",
    })  # fmt: skip
    body, token = "vit.", ""
    head = "classifier.weight"
    left_out = r"^(vit\.)?pooler\.|embeddings\.mask_token$"

    def assemble(self, shape: Shape) -> VisionTransformer:
        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(shape.width, eps=shape.norm_eps)

        def block() -> Block:
            attention = Attention(shape.width, shape.heads, bias=True, core=full_attention)
            return Block(norm(), attention, norm(), FeedForward(shape.width, shape.hidden, activation()))

        activation = ACTIVATION[shape.activation]
        return VisionTransformer(
            PatchEmbedding(shape.image, shape.patch, shape.channels, shape.width, shape.pool),  # type: ignore[arg-type]
            [block() for _ in range(shape.depth)],
            norm(),
            nn.Linear(shape.width, shape.vocabulary),
            shape.pool,  # type: ignore[arg-type]
        )

    def shape(self, config: Config) -> Shape:
        heads = number(config, "num_attention_heads", int)
        labels = config.get("id2label")
        return Shape(
            style=self.style,
            depth=number(config, "num_hidden_layers", int),
            width=number(config, "hidden_size", int),
            heads=heads,
            kv_heads=heads,
            hidden=number(config, "intermediate_size", int),
            # transformers leaves labels out where there are two without names
            vocabulary=len(labels) if labels else number(config, "num_labels", int, 2),
            length=0,
            tied=False,
            norm_eps=number(config, "layer_norm_eps", float, 1e-12),
            activation=READ[config.get("hidden_act", "gelu")],
            image=_side(config, "image_size", 224),
            patch=_side(config, "patch_size", 16),
            channels=number(config, "num_channels", int, 3),
        )

    def config(self, shape: Shape) -> dict[str, Any]:
        if shape.pool != "class":
            raise Refused(
                "a ViT of transformers answers by its class token, and this model by the mean of its patches",
                fix='train with model.pool = "class" what is to be exported',
            )
        return {
            "num_hidden_layers": shape.depth,
            "hidden_size": shape.width,
            "num_attention_heads": shape.heads,
            "intermediate_size": shape.hidden,
            "layer_norm_eps": shape.norm_eps,
            "hidden_act": SPELLED[shape.activation],
            "image_size": shape.image,
            "patch_size": shape.patch,
            "num_channels": shape.channels,
            "qkv_bias": True,
            "id2label": {str(label): f"LABEL_{label}" for label in range(shape.vocabulary)},
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }

    def table(self, shape: Shape) -> Iterator[Packing]:
        for ours, theirs in _EMBEDDING.items():
            if ours != "class_token" or shape.pool == "class":
                yield Packing(f"embedding.{ours}", (f"vit.embeddings.{theirs}",))
        for index in range(shape.depth):
            ours, theirs = f"blocks.{index}", f"vit.encoder.layer.{index}"
            for kind in ("weight", "bias"):
                qkv = tuple(f"{theirs}.attention.attention.{part}.{kind}" for part in ("query", "key", "value"))
                yield Packing(f"{ours}.attention.qkv.{kind}", qkv, rows=(shape.width,) * 3)
                for mine, yours in _BLOCK.items():
                    yield Packing(f"{ours}.{mine}.{kind}", (f"{theirs}.{yours}.{kind}",))
        for kind in ("weight", "bias"):
            yield Packing(f"norm.{kind}", (f"vit.layernorm.{kind}",))
        yield Packing("head.bias", ("classifier.bias",))


def _side(config: Config, key: str, default: int) -> int:
    """A height and width of config.json, which may be given as one number or as two equal ones."""
    value = config.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise Refused(f"config.json: {key} is {value}, and images and patches are square here")
        config = {**config, key: value[0]}
    side = number(config, key, int, default)
    if side > 1 << 16:
        raise UsageError(f"config.json: {key} is {side}", fix="give a number of pixels")
    return side
