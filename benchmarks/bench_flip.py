"""A step of a contrastive model that sees part of each image against one that sees it whole; and the loss in tiles.

    python benchmarks/bench_flip.py [--images 32 --preset clip-vit-b16 --depth 2 --pairs 4096] [--json FOLDER]

A step is forward pass, backward pass and update, of the preset's widths with fewer blocks and a caption of 32 tokens:
what is gained is the image tower's share. The loss alone is that of so many pairs of 512 numbers, forward and backward,
in tiles and with the whole matrix; beside its time the largest tensor that either makes.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from side_by_side import keep, ratio, side_by_side, tell
from steps import SameRows, whole_step
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.technique import Technique
from thrifty.kernels.contrastive_loss import contrastive_losses, contrastive_losses_reference
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import PRESETS
from thrifty.models.transformer import initialize
from thrifty.objectives.contrastive import Contrastive
from thrifty.techniques.data_selection.drop_patches import DropPatches
from thrifty.techniques.optimizers.adamw import AdamW

RATES = (0.5, 0.75)
WHOLE, MATRIX = "whole images", "whole matrix"
LENGTH, SPACE = 32, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pairs(count: int, shape: ModelConfig) -> SameRows:
    """Random images and captions."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, shape.channels, shape.image, shape.image, generator=generator)
    return SameRows({"inputs": inputs, "tokens": torch.randint(shape.vocabulary, (count, LENGTH), generator=generator)})


def composed(shape: ModelConfig, count: int, techniques: list[Technique]) -> Run:
    def build() -> nn.Module:
        model = assemble(shape)
        initialize(model, 0)
        return model

    return compose(BaseRun(build, pairs(count, shape), Contrastive()), [AdamW(), *techniques], 10, DEVICE)


def loss_alone(losses: Callable[[Tensor, Tensor], Tensor], pairs: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(pairs, SPACE, generator=generator) for _ in range(2))
    images, captions = (torch.nn.functional.normalize(each).to(DEVICE).requires_grad_() for each in drawn)

    def both_ways() -> None:
        losses(14 * images, captions).mean().backward()
        images.grad = captions.grad = None

    return both_ways


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation gives."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() * each.element_size() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.size = max(self.size, *sizes, 0)
        return result


def largest(work: Callable[[], None]) -> int:
    with Largest() as seen:
        work()
    return seen.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--preset", default="clip-vit-b16")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    shape = replace(PRESETS[asked.preset], depth=asked.depth, text_depth=asked.depth, vocabulary=4096, length=LENGTH)
    steps = {WHOLE: whole_step(composed(shape, asked.images, []))}
    for rate in RATES:
        steps[f"{100 * rate:g} % dropped"] = whole_step(
            composed(shape, asked.images, [DropPatches(rate=rate, until=10)])
        )
    timings = side_by_side(steps, rounds=asked.rounds, warmup=1)
    tell(f"a step, {asked.preset}, {asked.depth} blocks", timings, WHOLE, asked.images, "images/s")
    gains = {name: 1 / ratio(timings, name, WHOLE) for name in steps}
    print(*(f"  {name}: {gain:.2f} times as fast" for name, gain in gains.items()), sep="\n")
    losses = {MATRIX: loss_alone(contrastive_losses_reference, asked.pairs)}
    losses["tiles"] = loss_alone(contrastive_losses, asked.pairs)
    held = {name: largest(work) for name, work in losses.items()}
    of_loss = side_by_side(losses, rounds=asked.rounds, warmup=1)
    tell(f"the loss of {asked.pairs} pairs, forward and backward", of_loss, MATRIX, asked.pairs, "pairs/s")
    print(*(f"  {name}: the largest tensor has {size / 2**20:.1f} MiB" for name, size in held.items()), sep="\n")
    if asked.json:
        facts = {"preset": asked.preset, "blocks": asked.depth, "images": asked.images, "times_as_fast": gains}
        keep(asked.json / f"flip-step-{DEVICE.type}.json", {"benchmark": "a step of FLIP", **facts}, timings, WHOLE)
        facts = {"benchmark": "the contrastive loss", "pairs": asked.pairs, "largest_tensor": held}
        keep(asked.json / f"contrastive-loss-{DEVICE.type}.json", facts, of_loss, MATRIX)


if __name__ == "__main__":
    main()
