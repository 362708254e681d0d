"""Training step of a masked autoencoder without mask tokens in the encoder, against one with all patches.

Promise: at least three times the images per second at 75 %. A step is forward, backward and update of the preset
mae-tiny: 12 blocks of width 192 on images of 224 pixels in 196 patches, and a decoder of 2 blocks of width 96. The
encoder alone is timed too. Arguments: a folder for the results, images per batch, "bfloat16".
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from side_by_side import print_timings, ratio, save_timings, side_by_side
from steps import SameRows, whole_step
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.batches import Batch
from thrifty.core.technique import Technique
from thrifty.models.families import assemble
from thrifty.models.masked_autoencoder import MaskedAutoencoder
from thrifty.models.model_presets import PRESETS
from thrifty.models.transformer import initialize
from thrifty.objectives.masked_reconstruction import MaskedReconstruction
from thrifty.techniques.data_selection.drop_masked_patches import DropMaskedPatches
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.precision.mixed import MixedPrecision

RATES = (0.5, 0.75, 0.9)
SHAPE = PRESETS["mae-tiny"]
WHOLE = "all patches"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def images(batch: int) -> SameRows:
    generator = torch.Generator().manual_seed(0)
    return SameRows({"inputs": torch.randn(batch, SHAPE.channels, SHAPE.image, SHAPE.image, generator=generator)})


def model() -> MaskedAutoencoder:
    autoencoder = assemble(SHAPE)
    initialize(autoencoder, 0)
    assert isinstance(autoencoder, MaskedAutoencoder)
    return autoencoder


def composed(rate: float, batch: int, techniques: list[Technique]) -> Run:
    objective = MaskedReconstruction(rate=rate, patch=SHAPE.patch)
    return compose(BaseRun(model, images(batch), objective), [AdamW(), *techniques], 10, DEVICE)


def encoder_pass(batch: Batch, visible: bool) -> Callable[[], None]:
    encode = model().to(DEVICE).encode
    inputs, places = batch["inputs"].to(DEVICE), batch["visible"].to(DEVICE)

    def forward_backward() -> None:
        encode(inputs, places if visible else None).sum().backward()

    return forward_backward


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    half: list[Technique] = [MixedPrecision()] if "bfloat16" in sys.argv else []
    steps = {WHOLE: whole_step(composed(0.75, count, half))}
    passes = {WHOLE: encoder_pass(composed(0.75, count, []).source.at(0), visible=False)}
    for rate in RATES:
        run = partial(composed, rate, count)
        steps[f"{100 * rate:g} % dropped"] = whole_step(run([*half, DropMaskedPatches()]))
        passes[f"{100 * rate:g} % dropped"] = encoder_pass(run([]).source.at(0), visible=True)
    facts: dict[str, object] = {"benchmark": "a step of the masked autoencoder", "images": count}
    for title, ways in (("whole step", steps), ("encoder, forward and backward, float32", passes)):
        timings = side_by_side(ways, rounds=7, warmup=1)
        print_timings(f"{title}, {count} images", timings, WHOLE, count, "images/s")
        gains = {name: 1 / ratio(timings, name, WHOLE) for name in ways}
        print(*(f"  {name}: {gain:.2f} times as fast" for name, gain in gains.items()), sep="\n")
        if folder:
            part = "step" if ways is steps else "encoder"
            path = folder / f"mae-{part}-{DEVICE.type}{'-bfloat16' if half else ''}.json"
            save_timings(path, {**facts, "part": title, "times_as_fast": gains}, timings, WHOLE)


if __name__ == "__main__":
    main()
