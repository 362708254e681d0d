"""Runs on the handwritten digits, which train in milliseconds."""

from typing import Any

import torch
from tiny_runs import Repeated
from torch import nn

from thrifty.composition.compose import BaseRun
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.data.images.image_data import open_images
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.classification import Classification
from thrifty.objectives.masked_reconstruction import MaskedReconstruction


def tiny_vit(depth: int = 4, patch: int = 2, dropout: float = 0.0, **changed: Any) -> nn.Module:
    """Return a ViT of width 32, for digits of 8 x 8 pixels."""
    sizes: dict[str, Any] = {"image": 8, "patch": patch, "channels": 1, "tied": False, **changed}
    model = assemble(ModelConfig("vit", depth, 32, 4, 4, 64, 10, 0, **sizes))
    initialize(model, 0)
    if dropout:
        for block in model.blocks:
            block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(dropout))
    return model


def image_run(
    batch: int = 4, repeated: bool = False, augment: AugmentationSettings | None = None, **model: Any
) -> BaseRun:
    source = open_images(DataSettings(source="digits", batch=batch, augment=augment), 0, None, print).train
    return BaseRun(lambda: tiny_vit(**model), Repeated(source) if repeated else source, Classification())


def tiny_mae(depth: int = 4, decoder_depth: int = 2, dropout: float = 0.0, **changed: Any) -> nn.Module:
    """Return a masked autoencoder of widths 32 and 16, for digits of 8 x 8 pixels in 16 patches."""
    decoder = {"decoder_depth": decoder_depth, "decoder_width": 16, "decoder_heads": 2, "decoder_hidden": 32}
    sizes: dict[str, Any] = {"image": 8, "patch": 2, "channels": 1, "tied": False, **decoder, **changed}
    model = assemble(ModelConfig("mae", depth, 32, 4, 4, 64, 0, 0, **sizes))
    initialize(model, 0)
    if dropout:
        for block in (*model.blocks, *model.decoder.blocks):
            block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(dropout))
    return model


def autoencoder_run(batch: int = 4, repeated: bool = False, rate: float = 0.75, **model: Any) -> BaseRun:
    """Return a run that predicts removed patches of digits."""
    source = open_images(DataSettings(source="digits", batch=batch), 0, None, print, labelled=False).train
    objective = MaskedReconstruction(rate=rate, patch=model.get("patch", 2))
    return BaseRun(lambda: tiny_mae(**model), Repeated(source) if repeated else source, objective)


PIXELS = torch.linspace(-1, 1, 2 * 1 * 8 * 8).sin().view(2, 1, 8, 8)
