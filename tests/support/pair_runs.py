"""Runs on tiny images with captions, which train in milliseconds: a bright cross, and its position in words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_runs import Repeated
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun
from thrifty.data.epoch_sampler import EpochSource
from thrifty.kernels.example_rng import example_keys
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.contrastive import Contrastive

SIDE, LENGTH, END = 8, 12, 3
"""Side in pixels, length of a row in tokens, and the token at the end of each caption."""


class Crosses:
    """Images whose row i // 8 and column i % 8 are bright, with captions of the position in bytes and an end token."""

    def __len__(self) -> int:
        return SIDE * SIDE

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        rows, columns = torch.from_numpy(indices // SIDE), torch.from_numpy(indices % SIDE)
        place = torch.arange(SIDE)
        bright = (place == rows[:, None])[:, :, None] | (place == columns[:, None])[:, None, :]
        tokens = torch.full((len(indices), LENGTH), END)
        for number, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            words = f"row {row}" if row == column else f"r {row} col {column}"
            tokens[number, : len(words)] = torch.tensor(list(words.encode()))
        keep = (tokens == END).cumsum(1) <= 1
        return {"inputs": 2 * bright[:, None].float() - 0.5, "tokens": tokens, "keep": keep}


class TrainingCrosses(EpochSource):
    def fields(self, chosen: np.ndarray, numbers: np.ndarray) -> dict[str, Tensor]:
        return {**super().fields(chosen, numbers), "key": torch.from_numpy(example_keys(self.seed, numbers))}


def tiny_clip(depth: int = 2, dropout: float = 0.0, **changed: Any) -> nn.Module:
    """Return a CLIP model of width 32, for images of 8 x 8 pixels in 16 patches and captions of 12 bytes."""
    text = {"text_depth": depth, "text_width": 32, "text_heads": 4, "text_hidden": 64}
    sizes: dict[str, Any] = {"tied": False, "image": SIDE, "patch": 2, "channels": 1, "space": 24, **text, **changed}
    model = assemble(ModelConfig("clip", depth, 32, 4, 4, 64, 256, LENGTH, **sizes))
    initialize(model, 0)
    if dropout:
        for block in (*model.image.blocks, *model.text.blocks):
            block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(dropout))
    return model


def pair_run(batch: int = 4, repeated: bool = False, **model: Any) -> BaseRun:
    source = TrainingCrosses(Crosses(), batch, seed=0)
    return BaseRun(lambda: tiny_clip(**model), Repeated(source) if repeated else source, Contrastive())


def write_crosses(folder: Path, count: int = 128) -> Path:
    """Write `count` images of 16 x 16 pixels with a bright cross in each, and captions of its position."""
    lines = []
    for number in range(count):
        row, column = divmod(number % 64, 8)
        pixels = np.full((16, 16, 3), number // 64, np.uint8)
        pixels[2 * row : 2 * row + 2] = pixels[:, 2 * column : 2 * column + 2] = 220
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
        lines.append(json.dumps({"image": f"{number:03}.png", "caption": f"row {row}, column {column}"}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder
