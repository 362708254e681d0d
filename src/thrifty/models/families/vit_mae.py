"""MAE (He et al. 2021, arXiv 2111.06377) in transformers: a ViT, and a decoder that predicts pixels.

Positions are fixed, but folders store them, so they are read and written like weights. A new model of transformers 5
stores zero positions, which are read unchanged. The fraction of masked patches and the pixel normalization are training
settings, not model settings.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.kernels.image_patches import sinusoids_2d
from thrifty.models.families.model_family import Config, ParameterPacking, number
from thrifty.models.families.vit import EMBEDDING, PatchEncoder, packed_blocks
from thrifty.models.masked_autoencoder import MaskedAutoencoder, PatchDecoder
from thrifty.models.model_config import ModelConfig
from thrifty.models.vision_transformer import PatchEmbedding

_DECODER = {
    "decoder.embed.weight": "decoder_embed.weight",
    "decoder.embed.bias": "decoder_embed.bias",
    "decoder.mask_token": "mask_token",
    "decoder.position": "decoder_pos_embed",
    "decoder.norm.weight": "decoder_norm.weight",
    "decoder.norm.bias": "decoder_norm.bias",
    "head.bias": "decoder_pred.bias",
}


class ViTMAE(PatchEncoder):
    """MAE (He et al. 2021): a ViT encoder of visible patches, and a decoder that predicts pixels.

    Paper       He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (arXiv 2111.06377).
    Promise     Outputs for folders with `model_type` "vit_mae" equal transformers' outputs up to rounding.
    Use         run = thrifty.train("mae-nano", "digits", loss="masked_reconstruction", budget="2000 steps")
                thrifty.export(run, "my-mae")
    Start with  `mae-nano` and `data_selection.drop_masked_patches`, so that the encoder skips masked patches.
    Cost        The decoder processes all patches.
    Avoid       Classification without fine-tuning, because pretraining uses no labels.
    Does not    Learn position embeddings; positions are fixed and stored like weights.
    """

    style, model_type, architecture, task = "mae", "vit_mae", "ViTMAEForPreTraining", "masked_reconstruction"
    read = frozenset({
        "decoder_num_attention_heads", "decoder_hidden_size", "decoder_num_hidden_layers", "decoder_intermediate_size",
    })  # fmt: skip
    ignored = frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob", "mask_ratio", "norm_pix_loss"})
    body, token = "", ""
    head = "decoder.decoder_pred.weight"
    renamed: ClassVar = {"decoder.decoder_encoder.layer.": "decoder.decoder_layers."}

    def assemble(self, shape: ModelConfig) -> MaskedAutoencoder:
        return MaskedAutoencoder(
            PatchEmbedding(shape.image, shape.patch, shape.channels, shape.width, fixed=_positions(shape, shape.width)),
            [self.layer_norm_block(shape) for _ in range(shape.depth)],
            nn.LayerNorm(shape.width, eps=shape.norm_eps),
            self.decoder(shape),
            nn.Linear(shape.decoder_width, shape.vocabulary),
        )

    def decoder(self, shape: ModelConfig) -> PatchDecoder:
        heads = {"heads": shape.decoder_heads, "kv_heads": shape.decoder_heads}
        sizes = replace(shape, width=shape.decoder_width, hidden=shape.decoder_hidden, **heads)
        return PatchDecoder(
            nn.Linear(shape.width, shape.decoder_width),
            _positions(shape, shape.decoder_width),
            [self.layer_norm_block(sizes) for _ in range(shape.decoder_blocks)],
            nn.LayerNorm(shape.decoder_width, eps=shape.norm_eps),
        )

    def shape(self, config: Config) -> ModelConfig:
        return ModelConfig(
            style=self.style,
            vocabulary=0,
            decoder_depth=number(config, "decoder_num_hidden_layers", int, 8),
            decoder_width=number(config, "decoder_hidden_size", int, 512),
            decoder_heads=number(config, "decoder_num_attention_heads", int, 16),
            decoder_hidden=number(config, "decoder_intermediate_size", int, 2048),
            **self.encoder(config),
        )

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        return super().config(shape) | {
            "decoder_num_hidden_layers": shape.decoder_blocks,
            "decoder_hidden_size": shape.decoder_width,
            "decoder_num_attention_heads": shape.decoder_heads,
            "decoder_intermediate_size": shape.decoder_hidden,
        }

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        for ours, theirs in EMBEDDING.items():
            yield ParameterPacking(f"embedding.{ours}", (f"vit.embeddings.{theirs}",))
        yield from packed_blocks("blocks", "vit.encoder.layer", shape.depth, shape.width)
        yield from ParameterPacking.renamed({"norm": "vit.layernorm"})
        for ours, theirs in _DECODER.items():
            yield ParameterPacking(ours, (f"decoder.{theirs}",))
        yield from packed_blocks("decoder.blocks", "decoder.decoder_layers", shape.decoder_blocks, shape.decoder_width)


def encoder_shape(shape: ModelConfig, pool: str, labels: int) -> ModelConfig:
    """Return the shape of a MAE's encoder as a Vision Transformer with `labels` labels. Raise UsageError if `pool` is
    for models without a class token, because a MAE has a class token."""
    if pool == "mean":
        raise UsageError(
            'model.pool = "mean" is for models without a class token, but a trained MAE has one',
            fix='set model.pool = "patches" for the mean of its patches; or leave model.pool out',
        )
    shared = ("depth", "width", "heads", "kv_heads", "hidden", "norm_eps", "activation", "image", "patch", "channels")
    sizes = {name: getattr(shape, name) for name in shared}
    return ModelConfig("vit", vocabulary=labels, length=0, tied=False, pool=pool, **sizes)


def _positions(shape: ModelConfig, width: int) -> Tensor:
    """Return fixed positions (1, 1 + t, width) of the class token (zeros) and t patches."""
    rows = shape.image // shape.patch
    return torch.cat((torch.zeros(1, width, device="cpu"), sinusoids_2d(rows, rows, width)))[None]
