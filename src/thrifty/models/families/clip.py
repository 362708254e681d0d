"""CLIP (Radford et al. 2021, arXiv 2103.00020): an image encoder and a caption encoder with a common embedding space.

A caption's embedding is read at the end-of-text token. config.json must contain the token's id, so a model whose
tokenizer lacks this token cannot be exported.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.models.attention_layers import causal_attention
from thrifty.models.contrastive_model import INITIAL_SCALE, ContrastiveModel, ImageTower, TextTower
from thrifty.models.families.model_family import READ, SPELLED, Config, ModelFamily, ParameterPacking
from thrifty.models.init_laws import clip_normal
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer_blocks import TokenEmbedding
from thrifty.models.vision_transformer import PatchEmbedding

_SPELLED = SPELLED | {"quick_gelu": "quick_gelu"}
_READ = READ | {"quick_gelu": "quick_gelu"}
_CAPTIONS = {
    "text_depth": ("num_hidden_layers", 12),
    "text_width": ("hidden_size", 512),
    "text_heads": ("num_attention_heads", 8),
    "text_hidden": ("intermediate_size", 2048),
    "vocabulary": ("vocab_size", 49_408),
    "length": ("max_position_embeddings", 77),
}
_BLOCK = {
    "attention_norm": "layer_norm1",
    "attention.out": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_ENDS = {
    "image.first_norm": "vision_model.pre_layrnorm",
    "image.norm": "vision_model.post_layernorm",
    "text.norm": "text_model.final_layer_norm",
}
_TABLES = {
    "image.embedding.patch": "vision_model.embeddings.patch_embedding",
    "text.embedding.token": "text_model.embeddings.token_embedding",
    "text.embedding.position": "text_model.embeddings.position_embedding",
    "image.projection": "visual_projection",
    "text.projection": "text_projection",
}


class CLIP(ModelFamily):
    """CLIP (Radford et al. 2021): an image encoder and a text encoder with one embedding space.

    Paper       Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision (arXiv
                2103.00020).
    Promise     Embeddings for folders with `model_type` "clip" equal transformers' embeddings up to rounding.
    Use         run = thrifty.train("clip-nano", "captions", loss="contrastive", budget="2000 steps")
                print(thrifty.retrieve(run))
    Start with  `clip-nano` for a first run, `clip-vit-b32` for the published size.
    Cost        The loss compares all images with all captions of the effective batch.
    Avoid       Small batches, because each example then has few negatives.
    Does not    Export if the tokenizer has no end-of-text token, because caption embeddings are read at this token.
    """

    style, model_type, architecture, task = "clip", "clip", "CLIPModel", "contrastive"
    sections = ("text_config", "vision_config")
    fields: ClassVar = {
        "depth": ("num_hidden_layers", 12),
        "width": ("hidden_size", 768),
        "heads": ("num_attention_heads", 12),
        "hidden": ("intermediate_size", 3072),
        "image": ("image_size", 224),
        "patch": ("patch_size", 32),
        "channels": ("num_channels", 3),
    }
    read = frozenset({*sections, "layer_norm_eps", "vocab_size", "max_position_embeddings", "projection_dim"})
    only: ClassVar = {"hidden_act": tuple(_READ)}
    ignored = frozenset(
        {"dropout", "initializer_factor", "logit_scale_init_value", "text_config_dict", "vision_config_dict"}
    )
    token, head = "text_model.embeddings.token_embedding.weight", ""
    left_out = r"\.position_ids$"

    def assemble(self, shape: ModelConfig) -> ContrastiveModel:
        text = shape.caption_tower()
        image = ImageTower(
            PatchEmbedding(shape.image, shape.patch, shape.channels, shape.width, shape.pool, bias=False),  # type: ignore[arg-type]
            nn.LayerNorm(shape.width, eps=shape.norm_eps),
            [self.layer_norm_block(shape) for _ in range(shape.depth)],
            nn.LayerNorm(shape.width, eps=shape.norm_eps),
            nn.Linear(shape.width, shape.space, bias=False),
            shape.pool,  # type: ignore[arg-type]
        )
        captions = TextTower(
            TokenEmbedding(text.vocabulary, text.width, position=nn.Embedding(text.length, text.width)),
            [self.layer_norm_block(text, causal_attention, activation=shape.activation) for _ in range(text.depth)],
            nn.LayerNorm(text.width, eps=text.norm_eps),
            nn.Linear(text.width, shape.space, bias=False),
        )
        return ContrastiveModel(
            image, captions, partial(clip_normal, depths={"image": shape.depth, "text": text.depth})
        )

    def shape(self, config: Config) -> ModelConfig:
        text, vision = (_section(config, name) for name in self.sections)
        fields = self.read_fields(vision) | self.read_fields(text, _CAPTIONS)
        activation, eps = (
            _common(text, vision, key, default)
            for key, default in (("hidden_act", "quick_gelu"), ("layer_norm_eps", 1e-5))
        )
        return ModelConfig(
            style=self.style,
            kv_heads=fields["heads"],
            tied=False,
            norm_eps=eps,
            activation=_READ[activation],
            **self.read_fields(config, {"space": ("projection_dim", 512)}),
            **fields,
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        if shape.pool != "class":
            raise RefusedError(
                "a CLIP of transformers pools by its class token, but this model pools by the mean of its patches",
                fix='train with model.pool = "class" to export to this format',
            )
        common = {
            "hidden_act": _SPELLED[shape.activation],
            "layer_norm_eps": shape.norm_eps,
            "projection_dim": shape.space,
            "attention_dropout": 0.0,
        }
        return {
            "projection_dim": shape.space,
            "logit_scale_init_value": INITIAL_SCALE,
            "text_config": self.written_fields(shape, _CAPTIONS) | common,
            "vision_config": self.written_fields(shape) | common,
        }

    def with_special(self, config: dict[str, Any], special: Mapping[str, int | None]) -> dict[str, Any]:
        """Return the config with special tokens. Raise RefusedError if transformers could not find the end-of-text
        token of a caption."""
        end = special.get("eos_token_id")
        if end is None:
            raise RefusedError(
                "transformers reads a caption at its end-of-text token, but the tokenizer has none",
                fix="train with a tokenizer that has the special token <|endoftext|>",
            )
        if end == 2:  # CLIPTextModel then uses the token with the highest id, as in its first published folders
            raise RefusedError(
                "transformers does not support an end-of-text token with id 2: it uses the highest id",
                fix="train with a tokenizer whose end-of-text token has another id",
            )
        return config | {"text_config": config["text_config"] | special}

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        yield from ParameterPacking.renamed(_TABLES, kinds=["weight"])
        yield ParameterPacking("image.embedding.class_token", ("vision_model.embeddings.class_embedding",), ahead=2)
        yield ParameterPacking(
            "image.embedding.position", ("vision_model.embeddings.position_embedding.weight",), ahead=1
        )
        yield ParameterPacking("logit_scale", ("logit_scale",), ahead=1)
        yield from ParameterPacking.renamed(_ENDS)
        towers = (
            ("image", "vision_model", shape.depth, shape.width),
            ("text", "text_model", shape.text_depth, shape.text_width),
        )
        for mine, yours, depth, width in towers:
            for index in range(depth):
                ours, theirs = f"{mine}.blocks.{index}.", f"{yours}.encoder.layers.{index}."
                qkv = [f"{theirs}self_attn.{part}_proj" for part in "qkv"]
                yield from ParameterPacking.stacked(f"{ours}attention.qkv", qkv, (width,) * 3)
                yield from ParameterPacking.renamed(_BLOCK, ours, theirs)


def _section(config: Config, name: str) -> Config:
    section = config.get(name) or {}
    if not isinstance(section, dict):
        raise UsageError(f"config.json: {name} is {section!r}", fix=f"make {name} an object with a tower's settings")
    return section


def _common(text: Config, vision: Config, key: str, default: Any) -> Any:
    """Return a setting that both towers (image and caption encoder) share. Raise RefusedError if the towers' values
    differ."""
    values = [section.get(key, default) for section in (text, vision)]
    if values[0] != values[1]:
        raise RefusedError(
            f"config.json: {key} is {values[0]!r} for captions and {values[1]!r} for images, which is not supported",
            fix=f"pass the folder of a CLIP model with the same {key} in text_config and vision_config",
        )
    return values[0]
