"""Runs small enough to train in milliseconds on real images: the handwritten digits."""

from typing import Any

import torch
from torch import nn

from thrifty.core.compose import Plain
from thrifty.core.recipe import Augmentation, DataSettings
from thrifty.data.images import open_images
from thrifty.models.presets import Shape, assemble
from thrifty.models.transformer import initialize
from thrifty.objectives.classify import Classify
from tiny_runs import Repeated


def tiny_vit(depth: int = 4, patch: int = 2, **changed: Any) -> nn.Module:
    """Width 32, for digits of 8 x 8 pixels."""
    sizes: dict[str, Any] = {"image": 8, "patch": patch, "channels": 1, "tied": False, **changed}
    model = assemble(Shape("vit", depth, 32, 4, 4, 64, 10, 0, **sizes))
    initialize(model, 0)
    return model


def image_run(batch: int = 4, repeated: bool = False, augment: Augmentation | None = None, **model: Any) -> Plain:
    source = open_images(DataSettings(source="digits", batch=batch, augment=augment), 0, None, print).train
    return Plain(lambda: tiny_vit(**model), Repeated(source) if repeated else source, Classify())


PIXELS = torch.linspace(-1, 1, 2 * 1 * 8 * 8).sin().view(2, 1, 8, 8)
