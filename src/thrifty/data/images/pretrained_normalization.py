"""Normalization of images as for trained weights: of a run, or of a pretrained model by its image processor."""

import json
from dataclasses import replace
from pathlib import Path

from thrifty.core.errors import IntegrityError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.data.images.image_arrays import BRIGHTEST
from thrifty.data.run_metadata import read_image_spec

PROCESSOR = "preprocessor_config.json"


def normalized_for(model: ModelSettings, run: Path | None, ends: ImageModelSpec) -> ImageModelSpec:
    """Return `ends` with the mean and standard deviation that trained weights expect.

    The weights are those of `run`, the folder of a run that is used again, otherwise the pretrained weights of `model`.
    Without such weights, and without these values for the channels, return `ends`. Raises IntegrityError for damaged
    settings.
    """
    before = run and read_image_spec(run)
    if before and before.channels == ends.channels:
        return replace(ends, mean=before.mean, std=before.std)
    file = Path(model.folder) / PROCESSOR
    if not model.folder or model.reinitialize or not file.is_file():
        return ends
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        factor = float(stated.get("rescale_factor", 1 / BRIGHTEST)) if stated.get("do_rescale", True) else 1.0
        scale = round(BRIGHTEST * factor, 9)  # the processor divides pixels by 255 if this is 1
        given = [stated.get("image_mean"), stated.get("image_std")] if stated.get("do_normalize", True) else [0.0, 1.0]
        mean, std = ([each] * ends.channels if isinstance(each, int | float) else each or [] for each in given)
        if not len(mean) == len(std) == ends.channels:
            return ends
        if not min(scale, *std) > 0:
            raise ValueError(f"a scale of {min(scale, *std)}")
        return replace(ends, mean=tuple(each / scale for each in mean), std=tuple(each / scale for each in std))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"'{file}' has no usable normalization: {error}", fix="fetch the file again") from None
