"""Image classifiers of `transformers` from a local folder: DeiT, BEiT, Swin, DINOv2, SigLIP, ConvNeXt and others."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.modeling.patch_grid import resized_table
from thrifty.models.hf_folder import StoredTensors, image_sizes, read_config
from thrifty.models.hf_wrapper import HuggingFaceModel


class HuggingFaceImageClassifier(HuggingFaceModel):
    """Image classifier: `model(images)` maps (b, c, h, w) to logits (b, labels)."""

    task, auto, words = "image_classification", "AutoModelForImageClassification", "classifier of images"

    def inputs(self, *tensors: Tensor | None) -> dict[str, Any]:
        return {"pixel_values": tensors[0]}

    def check_visibility(self) -> None:
        """Accept every model, because the label is not in the image."""

    def _is_head_separate(self) -> bool:
        return False

    def example(self, device: torch.device) -> Tensor:
        """Return one blank image (1, c, h, w) as example input."""
        height, width = sides_of(self.lm.config) or (64, 64)
        return torch.zeros(1, _visual(self.lm.config).num_channels, height, width, device=device)


def settings_for(config: Any, ends: ImageModelSpec, fresh: bool) -> dict[str, Any]:
    """Return values of a configuration of transformers for the labels, and for a new model the size, of the data.

    Raise UsageError if trained weights have another number of channels than the images.
    """
    visual = _visual(config)
    channels = getattr(visual, "num_channels", ends.channels)
    if fresh:
        visual.num_channels = ends.channels
    elif channels != ends.channels:
        raise UsageError(
            f"the images have {ends.channels} channels, but the model has {channels}",
            fix="set model.reinitialize = true to start from random weights; or choose another model",
        )
    if hasattr(visual, "image_size"):
        visual.image_size = ends.side if isinstance(visual.image_size, int) else (ends.side, ends.side)
    labels = dict(enumerate(ends.labels))
    numbers = {name: number for number, name in labels.items()}
    return {"num_labels": len(labels), "id2label": labels, "label2id": numbers}  # some store their number, too


@torch.no_grad()
def resize_positions(lm: nn.Module, folder: Path, mismatched: set[str]) -> set[str]:
    """Fill position tables whose stored size is for other images with interpolated values. Return the names of the
    filled tables."""
    filled, tables = set(), {name: each for name, each in lm.named_parameters() if "position_embedding" in name}
    with StoredTensors(folder) as stored:
        for name in mismatched & stored.names & tables.keys():
            table, value = tables[name], stored[name]
            grid = _grid(lm.config)
            before = table.shape[-2] - math.prod(grid)
            if not grid or before < 0 or table.shape[-1] != value.shape[-1]:
                continue
            if round((value.shape[-2] - before) ** 0.5) ** 2 != value.shape[-2] - before:
                continue
            table.copy_(resized_table(value, (grid[0], grid[1]), before))
            filled.add(name)
    return filled


def refuse_other_size(folder: Path, missing: set[str], ends: ImageModelSpec) -> None:
    """Raise RefusedError if parameters depend on the size of images in a way that cannot be converted."""
    stored, _ = image_sizes(read_config(folder))
    if missing and stored != ends.side:
        raise RefusedError(
            f"the weights in {str(folder)!r} are for images of {stored} pixels, and {sorted(missing)[0]} cannot be "
            f"converted to {ends.side}",
            fix=f"--set data.size={stored}; or set model.reinitialize = true to start from random weights",
        )


def sides_of(config: Any) -> tuple[int, int] | None:
    """Return height and width of the images of a model; None if the model has no fixed size."""
    size = getattr(_visual(config), "image_size", None)
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


def _grid(config: Any) -> tuple[int, ...]:
    """Return height and width of the images of a model in patches; () if it has no single size of patches."""
    patch = getattr(_visual(config), "patch_size", None)
    sides = sides_of(config)
    if sides is None or patch is None:
        return ()
    return tuple(side // (patch if isinstance(patch, int) else patch[axis]) for axis, side in enumerate(sides))


def _visual(config: Any) -> Any:
    return getattr(config, "vision_config", None) or config
